"""A common time axis for ranks on hosts with different clocks.

    rank 0    ───── sum ─┐ s = clock ── broadcast s ────────────▶
    rank r    before ─ sum ───────────── broadcast s ─ after ────

Rank 0 reads its clock after every rank has entered the sum, and before any has the reading: so s lies between
``before`` and ``after`` of every rank. Their midpoint is r's time for s, wrong by at most half of their difference, as
in the Network Time Protocol (Mills 1991); the shortest of several rounds counts. Ranks of a host share its clock, so
the shortest of any of them counts for all, and rank 0's host needs none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from superstep.comm.device import Device
from superstep.comm.objects import gather
from superstep.state.file_shares import running_system

ROUNDS = 16


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Seconds to add to this rank's clock for rank 0's, and their largest error in seconds."""

    seconds: float
    within_s: float


def offset_to_rank_0(
    device: Device, *, clock: Callable[[], float] = time.perf_counter, host: str | None = None
) -> ClockOffset:
    """Compare this rank's clock with rank 0's. Every rank calls this together.

    Args:
        device: where the ranks' group can send from.
        clock: seconds, the same for all ranks of a host.
        host: the name of the clock; None means this machine since its start.
    """
    host = host or running_system()
    hosts = gather(host, str)
    if len(set(hosts)) == 1:
        return ClockOffset(0.0, 0.0)
    best = min((_round(device, clock) for _ in range(ROUNDS)), key=lambda round_trip: round_trip.within_s)
    offsets = gather(best, ClockOffset)
    if host == hosts[0]:
        return ClockOffset(0.0, 0.0)
    return min((f for f, whose in zip(offsets, hosts, strict=True) if whose == host), key=lambda f: f.within_s)


def _round(device: Device, clock: Callable[[], float]) -> ClockOffset:
    value = torch.zeros((), dtype=torch.float64, device=device.torch)
    before_s = clock()
    dist.all_reduce(value)
    value.item()  # a GPU is only told to; this waits until it has
    value.fill_(clock())
    dist.broadcast(value, src=0)
    s = value.item()
    after_s = clock()
    return ClockOffset(s - (before_s + after_s) / 2, (after_s - before_s) / 2)

"""Stall detection: whether any rank of a job makes progress; emulated GPUs are all on this host.

It uses processor times, not only a clock: a rank without a core on a busy host is ready to run, and one that computes
between its calls uses a processor.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import psutil

STALL_S = 10.0
"""Seconds without progress after which a job counts as stuck."""

BUSY_SHARE = 0.02
"""Share of a processor. A waiting rank polls with a fifth of it; a computing one gets more even among 50 on two cores.
"""

RESTING = (psutil.STATUS_SLEEPING, psutil.STATUS_IDLE, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class StallDetector:
    """Called about once a second during a call."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._cpu_s: dict[int, float] = {}

    def reset(self) -> None:
        """Note progress."""
        self._cpu_s = {}

    def is_stalled(self, ranks: Sequence[psutil.Process]) -> bool:
        """Whether for ``STALL_S`` no rank has computed, been ready to, or waited for a disk or a process of its own."""
        now_s, cpu_s = time.monotonic(), {rank.pid: _cpu_s(rank) for rank in ranks}
        has_moved = self._have_computed(cpu_s) or not all(_is_resting(rank) for rank in ranks)
        if not has_moved and now_s - self._since_s < STALL_S:
            return False
        if not has_moved and all(_is_resting(child) for rank in ranks for child in _children(rank)):
            return True
        self._since_s, self._cpu_s = now_s, cpu_s
        return False

    def _have_computed(self, cpu_s: Mapping[int, float]) -> bool:
        """Whether ranks have computed since the start of the span; True also without a start, or for another job."""
        if self._cpu_s.keys() != cpu_s.keys():
            return True
        return any(cpu_s[pid] - before > STALL_S * BUSY_SHARE for pid, before in self._cpu_s.items())


def has_ended(rank: psutil.Process) -> bool:
    """Whether a process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not rank.is_running() or rank.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return True


def _cpu_s(rank: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = rank.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _is_resting(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() in RESTING
    return True


def _children(rank: psutil.Process) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from rank.children(recursive=True)

"""Replicas of the sampler that finish at different times, each of which is kept informed that the others go on.

    replica 0   sample ── meet ── sample ── meet ─ done ─ meet ─────────── meet
    replica 1   sample ── meet ── sample ── meet ── sample ── meet ── sample ─ done ─ meet

A collective has a time limit of its own. It is here for what a replica does from one meeting to the next, and not for
all of its sampling: one that is slow is waited for, and one that does not go on ends the run.
"""

from __future__ import annotations

import time

import torch

from superstep.comm.collectives import sum_over
from superstep.comm.device import Device
from superstep.comm.mesh import Group


class ReplicaGroup:
    """Those of one world that begin to sample together, seen from the first rank of one of them.

    Args:
        group: the first rank of each; None where there is one replica.
        device: where this one computes.
        every_s: how often they meet.
    """

    def __init__(self, group: Group | None, device: Device, every_s: float) -> None:
        self._group = group
        self._device = device
        self._every_s = every_s
        self._met_s = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the next meeting is."""
        return time.monotonic() - self._met_s >= self._every_s

    def meet(self, *, is_done: bool) -> bool:
        """Wait for the others, at most for as long as a step of theirs takes; whether all of them are done.

        Args:
            is_done: whether this one is.
        """
        left = sum_over(torch.tensor(int(not is_done), device=self._device.torch), self._group)
        self._met_s = time.monotonic()
        return int(left) == 0

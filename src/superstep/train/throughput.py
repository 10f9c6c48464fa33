"""Measurements of a rank: seconds of its steps, its memory, and MFU."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from superstep.comm.device import Device
from superstep.comm.objects import gather

WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRate:
    """Reference of MFU.

    Attributes:
        flops_per_token: operations of training on one token.
        peak_flops: FLOP/s of one rank's device.
    """

    flops_per_token: float | None
    peak_flops: float | None


class ThroughputMeter:
    """Meter of one rank; made before its engine, to count the engine's memory.

    Args:
        device: of the rank.
        rate: reference of MFU, if known.
        ranks: their number.
    """

    def __init__(self, device: Device, rate: PeakRate, ranks: int) -> None:
        self._device = device
        self._flops_per_token = rate.flops_per_token
        self._peak_flops = None if rate.peak_flops is None else rate.peak_flops * ranks
        self._start_s = time.perf_counter()
        self._before_bytes = device.count_from_here()
        self._memory_bytes = 0
        self._steps_s: list[float] = []

    def mfu(self, tokens_per_s: float) -> float | None:
        """Model FLOP/s as a share of the ranks' peak; None if unknown."""
        if self._peak_flops is None or self._flops_per_token is None:
            return None
        return tokens_per_s * self._flops_per_token / self._peak_flops

    def memory_bytes(self) -> int:
        """The largest memory of any rank at the last exchange, or this rank's now."""
        self._memory_bytes = max(self._memory_bytes, self._device.memory_bytes())
        return self._memory_bytes

    def ask_memory(self) -> None:
        """Exchange the memory of all ranks. Every rank calls this together."""
        self._memory_bytes = max(gather(self._device.memory_bytes(), int))

    def took(self, step_s: float) -> None:
        self._steps_s.append(step_s)

    def typical_step_s(self) -> float | None:
        """The median step since this process began, without warm-up; None of fewer than three."""
        later = self._steps_s[WARM_UP_STEPS:]
        return statistics.median(later) if later else None

    def peak_bytes(self) -> int | None:
        """Peak memory of tensors on any rank since before its engine. Every rank calls this together.

        None on a CPU: its process also grows by libraries, by pages of the corpus and by the allocator's cache, more
        than by a small model.
        """
        if self._device.kind == "cpu":
            return None
        return max(gather(self._device.peak_bytes() - self._before_bytes, int))

    def elapsed_s(self) -> float:
        """Seconds since this process began."""
        return time.perf_counter() - self._start_s

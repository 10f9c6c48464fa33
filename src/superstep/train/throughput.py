"""What a rank measures of its run beside the steps: their seconds, its memory, and what MFU is held against."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from superstep.comm.device import Device
from superstep.comm.objects import gather

WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRate:
    """What MFU is measured by.

    Attributes:
        flops_per_token: operations that training on one token needs.
        peak_flops: FLOP/s of one rank's device.
    """

    flops_per_token: float | None
    peak_flops: float | None


class ThroughputMeter:
    """One rank's; made before its engine, whose memory it counts.

    Args:
        device: where the rank computes.
        rate: what MFU is measured by, where it is known.
        ranks: how many there are.
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
        """Model FLOP/s as a share of the ranks' peak, where that is known."""
        if self._peak_flops is None or self._flops_per_token is None:
            return None
        return tokens_per_s * self._flops_per_token / self._peak_flops

    def memory_bytes(self) -> int:
        """The largest memory of any rank when last asked, and this rank's now."""
        self._memory_bytes = max(self._memory_bytes, self._device.memory_bytes())
        return self._memory_bytes

    def ask_memory(self) -> None:
        """Ask every rank for its memory. Every rank calls this together."""
        self._memory_bytes = max(gather(self._device.memory_bytes()))

    def took(self, step_s: float) -> None:
        """Note what a step took."""
        self._steps_s.append(step_s)

    def typical_step_s(self) -> float | None:
        """The median step since this process began, but for the first ones, which find memory; None of fewer than
        three.
        """
        later = self._steps_s[WARM_UP_STEPS:]
        return statistics.median(later) if later else None

    def peak_bytes(self) -> int | None:
        """The most that tensors have taken on any rank since before its engine. Every rank calls this together.

        None on a CPU: its process grows by libraries, by pages of the corpus and by what its allocator keeps as well,
        by more than by a small model.
        """
        if self._device.kind == "cpu":
            return None
        return max(gather(self._device.peak_bytes() - self._before_bytes))

    def elapsed_s(self) -> float:
        """Seconds since this process began."""
        return time.perf_counter() - self._start_s

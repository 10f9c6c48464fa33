"""Observations of an emulated GPU: unordered uses of memory, waits of the host, memory, times."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from superstep.strict.build import MODULE


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A finished kernel, copy or call of a communicator.

    Attributes:
        stream: its number; of a communicator, that of its queue.
        is_communication: whether a communicator ran it.
        what: the operator, and the calling lines.
        begin_s, end_s: by the host's monotonic clock.
    """

    stream: int
    is_communication: bool
    what: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Observations since the last report.

    Attributes:
        races: number of unordered pairs of uses of the same bytes, by their lines.
        host_waits: number of waits of the host for the GPU, by operator and line.
        launches: kernels, copies and collectives that were issued.
        peak_bytes: peak of allocated memory.
        device_bytes: total memory.
        contexts: the GPUs that the process has ever used.
        context_lines: for each, the line of its first use.
        trace: events in order, if they were recorded.
    """

    races: Mapping[str, int]
    host_waits: Mapping[str, int]
    launches: int
    peak_bytes: int
    device_bytes: int
    contexts: frozenset[int]
    context_lines: Mapping[int, str]
    trace: tuple[TraceEvent, ...] = ()


class Monitor:
    """Observes a GPU of this process, which has loaded the device.

    Args:
        index: the GPU's number.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._device: ModuleType = importlib.import_module(MODULE)
        self._launches = 0
        self.report()

    def record(self, *, is_recording: bool) -> None:
        """Start or stop recording events."""
        self._device.record(is_recording)

    def races(self) -> Mapping[str, int]:
        """Races since the last report, also of a rank that has failed: it waits for nothing."""
        return Counter(self._device.take_races())

    def report(self) -> Report:
        """Observations since the last report. Waits for all running work, without counting that as a wait."""
        device = self._device
        host_waits = device.take_host_waits()
        torch.cuda.synchronize(self._index)
        device.take_host_waits()
        before, self._launches = self._launches, device.launches()
        peak_bytes = device.statistics(self._index)["allocated_bytes"]["peak"]
        device.reset_peak(self._index)
        return Report(
            races=Counter(device.take_races()),
            host_waits=host_waits,
            launches=self._launches - before,
            peak_bytes=peak_bytes,
            device_bytes=device.device_bytes(),
            contexts=frozenset(device.contexts()),
            context_lines=device.context_lines(),
            trace=tuple(TraceEvent(*each) for each in device.take_trace()),
        )

"""What is observed on an emulated GPU: uses of memory without an order, waits of the host, memory, what ran when."""

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
    """A kernel, a copy or a call of a communicator that has run.

    Attributes:
        stream: its number; of a communicator, that of its queue.
        is_communication: whether a communicator ran it.
        what: the operator, and the lines that called it.
        begin_s, end_s: by the host's monotonic clock.
    """

    stream: int
    is_communication: bool
    what: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was observed since the last report.

    Attributes:
        races: how often two uses of the same bytes met that nothing orders, by the lines of the two.
        host_waits: how often the host waited for the GPU, by operator and line.
        launches: kernels, copies and collectives that were issued.
        peak_bytes: the most memory that was allocated at once.
        device_bytes: the memory that there is.
        contexts: the GPUs that the process has ever used.
        context_lines: of each the line that used it first.
        trace: what ran, in its order, where that was recorded.
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
        """From now on, remember what runs, or no longer."""
        self._device.record(is_recording)

    def report(self) -> Report:
        """What was observed since the last report. Waits until nothing is under way, which is not counted as a wait."""
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

"""What a rank does beside its programs, told to its heart: it waits for a batch, or tells what was done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from superstep.monitor.status_page import HeartbeatReceiver, beside
from superstep.observe.doctor.observations import DATA, REPORT
from superstep.observe.events import Event, Sink

T = TypeVar("T")


def report_waits(heart: HeartbeatReceiver, batches: Iterable[T]) -> Iterator[T]:
    """The batches; while one is waited for, the rank says so."""
    each = iter(batches)
    while True:
        with beside(heart, DATA):
            found = next(each, None)
        if found is None:
            return
        yield found


class StatusSink:
    """A sink that is written to beside the programs; whoever listens there keeps the rank."""

    def __init__(self, heart: HeartbeatReceiver, sink: Sink) -> None:
        self._heart, self._sink = heart, sink

    def write(self, event: Event) -> None:
        """Write to the sink."""
        with beside(self._heart, REPORT):
            self._sink.write(event)

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()

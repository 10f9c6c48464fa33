"""Reports a rank's activity outside the program to its heartbeat: waits for a batch, and writes of events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from superstep.monitor.status_page import HeartbeatReceiver, beside
from superstep.observe.doctor.observations import DATA, REPORT
from superstep.observe.events import Event, Sink

T = TypeVar("T")


def report_waits(heart: HeartbeatReceiver, batches: Iterable[T]) -> Iterator[T]:
    """Iterate over batches; the rank reports while it waits."""
    each = iter(batches)
    while True:
        with beside(heart, DATA):
            batch = next(each, None)
        if batch is None:
            return
        yield batch


class StatusSink:
    """A sink that reports to the heartbeat while it writes."""

    def __init__(self, heart: HeartbeatReceiver, sink: Sink) -> None:
        self._heart, self._sink = heart, sink

    def write(self, event: Event) -> None:
        with beside(self._heart, REPORT):
            self._sink.write(event)

    def close(self) -> None:
        self._sink.close()

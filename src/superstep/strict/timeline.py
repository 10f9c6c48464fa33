"""Events on emulated GPUs in Chrome's trace format: the order is real, the seconds are those of a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from superstep.strict.monitor import TraceEvent

US = 1e6


def timeline_text(ranks: Sequence[Sequence[TraceEvent]]) -> str:
    """The file: a process for each rank, a thread for each of its streams and communicators."""
    begin_s = min((event.begin_s for rank in ranks for event in rank), default=0.0)
    events = [event for number, rank in enumerate(ranks) for event in _of(number, rank, begin_s)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _of(number: int, rank: Sequence[TraceEvent], begin_s: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": f"rank {number}"}}
    for stream, is_communication in sorted({(event.stream, event.is_communication) for event in rank}):
        name = f"communicator {stream}" if is_communication else f"stream {stream}"
        yield {"ph": "M", "pid": number, "tid": stream, "name": "thread_name", "args": {"name": name}}
    for place, event in enumerate(rank):
        name, _, lines = event.what.partition(" (")
        yield {
            "ph": "X",
            "pid": number,
            "tid": event.stream,
            "name": name.removeprefix("aten::"),
            "ts": (event.begin_s - begin_s) * US,
            "dur": (event.end_s - event.begin_s) * US,
            "args": {"order": place, "line": lines.removesuffix(")")},
        }

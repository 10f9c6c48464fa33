"""What ran on emulated GPUs, as Chrome's trace format: the order is what counts, the seconds are those of a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from superstep.strict.seen import Ran

US = 1e6


def timeline_text(ranks: Sequence[Sequence[Ran]]) -> str:
    """The file: a process for each rank, a thread for each of its streams and communicators."""
    begin_s = min((ran.begin_s for rank in ranks for ran in rank), default=0.0)
    events = [event for number, rank in enumerate(ranks) for event in _of(number, rank, begin_s)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _of(number: int, rank: Sequence[Ran], begin_s: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": f"rank {number}"}}
    for stream, is_communication in sorted({(ran.stream, ran.is_communication) for ran in rank}):
        name = f"communicator {stream}" if is_communication else f"stream {stream}"
        yield {"ph": "M", "pid": number, "tid": stream, "name": "thread_name", "args": {"name": name}}
    for place, ran in enumerate(rank):
        name, _, lines = ran.what.partition(" (")
        yield {
            "ph": "X",
            "pid": number,
            "tid": ran.stream,
            "name": name.removeprefix("aten::"),
            "ts": (ran.begin_s - begin_s) * US,
            "dur": (ran.end_s - ran.begin_s) * US,
            "args": {"order": place, "line": lines.removesuffix(")")},
        }

"""A step in Chrome's trace format, for Perfetto and chrome://tracing.

A process is a pipeline rank, a thread a lane. An instruction is a slice; a transfer is a slice on the sender with an
arrow (flow) to the receiver's; memory is a counter of each rank. Format: "Trace Event Format" (Google), JSON, times in
µs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from superstep.program.instructions import Recv, Send
from superstep.program.peak_memory import Peak
from superstep.program.text import describe
from superstep.program.timeline import Timeline, TimelineEvent

LANES = ("compute", "fetch", "reduce", "act", "grad", "snapshot", "out", "in")
US = 1e6


def chrome_trace(
    timeline: Timeline, *, name: str, courses: Sequence[Sequence[Peak]] = (), predicted: Timeline | None = None
) -> str:
    """The text of the file: a slice for each instruction; those of ``predicted`` are processes after the others."""
    events = list(_of(timeline, name, 0, courses))
    if predicted is not None:
        events += _of(predicted, f"{name}, predicted", timeline.program.pp, courses)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _of(timeline: Timeline, name: str, first: int, courses: Sequence[Sequence[Peak]]) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.program.pp):
        place = {"ph": "M", "pid": first + rank, "tid": 0}
        yield place | {"name": "process_name", "args": {"name": f"{name}: rank {rank}"}}
        yield place | {"name": "process_sort_index", "args": {"sort_index": first + rank}}
        for number, lane in enumerate(LANES):
            yield place | {"tid": number, "name": "thread_name", "args": {"name": lane}}
            yield place | {"tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
    start_s = timeline.start_s
    for e in timeline.events:
        yield from _slice(e, start_s, first)
    for rank, levels in enumerate(courses):
        for e in timeline.of(rank):
            level = levels[e.index]
            held = {
                "gathered parameters": level.params_bytes,
                "whole gradients": level.gradient_bytes,
                "kept activations": level.kept_bytes,
                "between units": level.boundary_bytes,
                "workspace": level.workspace_bytes,
            }
            if e.lane == "compute":
                ts = (e.start_s - start_s) * US
                yield {"ph": "C", "name": "bytes", "pid": first + rank, "tid": 0, "ts": ts, "args": held}


def _slice(e: TimelineEvent, start_s: float, first: int) -> Iterator[dict[str, Any]]:
    ts, pid, tid = (e.start_s - start_s) * US, first + e.rank, LANES.index(e.lane)
    name = describe(e.instruction)
    slice_ = {"ph": "X", "name": name, "cat": e.lane, "pid": pid, "tid": tid, "ts": ts}
    yield slice_ | {"dur": (e.end_s - e.start_s) * US, "args": {"instruction": e.index}}
    if isinstance(e.instruction, Send | Recv):
        i = e.instruction
        ends = (e.rank, i.peer) if isinstance(i, Send) else (i.peer, e.rank)
        flow = {"cat": "transfer", "name": i.wire, "pid": pid, "tid": tid, "ts": ts}
        flow["id"] = f"{first}.{i.wire}.{i.unit}.{i.microbatch}.{ends[0]}.{ends[1]}"
        yield flow | ({"ph": "s"} if isinstance(i, Send) else {"ph": "f", "bp": "e"})

"""A step as a run recorded it, as a Timeline.

    {"step": 20, "ranks": [[[index, start_s, end_s], ...], ...]}     one list for each pipeline rank, one clock

A CPU rank records when it came to an instruction and when it went on. So a compute includes its wait for another rank,
and a transfer only its start. The records of all ranks together correct that: a transfer starts when both ends have
started it, a compute after its inputs, a sum or the step when all its ranks have come. The time of a collective, and of
a transfer on its way, is not recorded: it stays in the compute. On a GPU events give the times, and little is
corrected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from superstep.errors import StateError
from superstep.program.instructions import Program, Recv, Send, Step, Tie
from superstep.program.timeline import Arrival, Needs, Timeline, TimelineEvent, brings


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step, with its number in the run."""

    step: int
    timeline: Timeline


def load_trace(path: Path, program: Program) -> RecordedStep:
    """Read a run's record of one step of ``program``; raises StateError where it cannot be read or is of another
    program.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        step = int(raw["step"])
        ranks = [[(int(at), float(start), float(end)) for at, start, end in rank] for rank in raw["ranks"]]
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(f"{path} is no trace ({error!r}); the next checkpoint of the run writes it anew.") from error
    if [sorted(at for at, _, _ in rank) for rank in ranks] != [list(range(len(r))) for r in program.ranks]:
        raise StateError(
            f"{path} is the trace of another program than the one beside it; the next checkpoint of the run writes "
            "it anew."
        )
    events = [
        TimelineEvent(number, at, program.ranks[number][at], start_s, end_s)
        for number, rank in enumerate(ranks)
        for at, start_s, end_s in rank
    ]
    ordered = sorted(_untangle(program, events), key=lambda e: (e.start_s, e.rank, e.index))
    return RecordedStep(step, Timeline(program, tuple(ordered)))


def _untangle(program: Program, events: Iterable[TimelineEvent]) -> list[TimelineEvent]:
    """The events without the waits that other ranks' events explain."""
    joined = [e for members in _together(events).values() for e in _join_members(members)]
    waits_for = Needs(program)
    came: dict[tuple[int, Arrival], float] = {}
    for e in joined:
        if isinstance(e.instruction, Recv) and (arrival := brings(e.instruction)):
            came[e.rank, arrival] = e.end_s
    return [
        _after(
            e,
            max(
                (came.get((e.rank, a), e.start_s) for a in waits_for(e.instruction)),
                default=e.start_s,
            ),
        )
        for e in joined
    ]


def _together(events: Iterable[TimelineEvent]) -> dict[tuple[object, ...], list[TimelineEvent]]:
    """Events by joint operation: both ends of a transfer, all ranks of a sum or of the step."""
    groups: dict[tuple[object, ...], list[TimelineEvent]] = {}
    for e in events:
        match e.instruction:
            case Send(wire, unit, m) | Recv(wire, unit, m):
                key: tuple[object, ...] = (wire, unit, m)
            case Tie() | Step():
                key = (e.instruction,)
            case _:
                key = (e.rank, e.index)
        groups.setdefault(key, []).append(e)
    return groups


def _join_members(members: list[TimelineEvent]) -> list[TimelineEvent]:
    """None starts before the last rank has come, and both ends of a transfer take the same time."""
    start_s, end_s = max(e.start_s for e in members), max(e.end_s for e in members)
    if isinstance(members[0].instruction, Send | Recv):
        return [replace(e, start_s=start_s, end_s=end_s) for e in members]
    return [_after(e, start_s) for e in members]


def _after(event: TimelineEvent, start_s: float) -> TimelineEvent:
    return replace(event, start_s=min(max(event.start_s, start_s), event.end_s))

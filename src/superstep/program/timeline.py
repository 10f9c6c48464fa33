"""The step on a clock: what ran when on each rank, simulated or recorded.

One value serves both, so the same code sums, compares and draws predictions and recordings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Lane, Program, lane
from superstep.program.needed_values import NeededValues
from superstep.program.offload import find_ended_offloads, list_moved

EXPOSED: tuple[Lane, ...] = ("fetch", "reduce", "act", "grad", "snapshot", "out", "in")
"""The lanes beside the compute."""

Channel: TypeAlias = tuple[Lane, str, int | None]
Arrival: TypeAlias = tuple[Lane, int, int | None]
"""What a lane brings: parameters (fetch, u), a summed gradient (reduce, u), a copy (snapshot, u), a transfer (act or
grad, u, m), or kept activations in their new place (out or in, u, m).
"""


def brings(instruction: Instruction) -> Arrival | None:
    """What an instruction beside the compute brings."""
    match instruction:
        case ins.Fetch(unit):
            return "fetch", unit, None
        case ins.Reduce(unit) | ins.ReduceReplicas(unit):
            return "reduce", unit, None
        case ins.Recv(wire, unit, m, _):
            return wire, unit, m
        case ins.Snapshot(unit):
            return "snapshot", unit, None
        case ins.Offload(unit, m):
            return "out", unit, m
        case ins.Reload(unit, m):
            return "in", unit, m
        case _:
            return None


class Needs:
    """What an instruction needs, of what was issued before (the table in ``instructions``)."""

    def __init__(self, program: Program) -> None:
        self._values = NeededValues(program)
        # Made once: a program asks for them again with each microbatch.
        self._fetched: list[list[Arrival]] = [[("fetch", u, None) for u in units] for units in program.params]
        self._reduced: list[Arrival] = [("reduce", u, None) for u in range(len(program.units))]
        self._copied: list[Arrival] = [("snapshot", u, None) for u in range(len(program.units))]
        self._moved: dict[Instruction, list[Arrival]] = _find_moved(program)

    def __call__(self, instruction: Instruction) -> list[Arrival]:
        needed = self._list_needs(instruction)
        return [*needed, *self._moved[instruction]] if instruction in self._moved else needed

    def _list_needs(self, instruction: Instruction) -> list[Arrival]:
        match instruction:
            case ins.Forward(unit) | ins.Backward(unit) | ins.BackwardInput(unit):
                return [*self._values(instruction), *self._fetched[unit]]
            case ins.Send():
                return [*self._values(instruction)]
            case ins.Recompute(unit, _):
                return self._fetched[unit]
            case ins.Settle(unit):
                return [("reduce", unit, None)]
            case ins.Tie() | ins.ReducePartial():
                return self._reduced
            case ins.Step():
                return self._reduced + self._copied
            case _:
                return []


def _find_moved(program: Program) -> dict[Instruction, list[Arrival]]:
    """What instructions need of the lanes ``out`` and ``in``."""
    moved = list_moved(program)
    needs: dict[Instruction, list[Arrival]] = {}
    for rank, instructions in enumerate(program.ranks if moved else ()):
        for place, keys in find_ended_offloads(program, rank).items():
            needs[instructions[place]] = [("out", *key) for key in keys]
        for i in instructions:
            if isinstance(i, ins.Recompute | ins.Backward | ins.BackwardInput) and (i.unit, i.microbatch) in moved:
                needs.setdefault(i, []).append(("in", i.unit, i.microbatch))
            elif isinstance(i, ins.Reload):
                needs.setdefault(i, [])[:0] = [("out", i.unit, i.microbatch)]
    return needs


def waits_for(program: Program, instruction: Instruction) -> list[Arrival]:
    """What one instruction needs."""
    return Needs(program)(instruction)


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One instruction as it ran. A transfer is two events, a Send and a Recv, of the same seconds. ``index``: the
    instruction's place in its rank's list.
    """

    rank: int
    index: int
    instruction: Instruction
    start_s: float
    end_s: float

    @property
    def lane(self) -> Lane:
        return lane(self.instruction)


@dataclass(frozen=True, slots=True)
class Wait:
    """Idle compute of one rank. ``lane``: the lane that works on what the compute needs; None while another rank has
    yet to deliver or come.
    """

    start_s: float
    end_s: float
    lane: Lane | None


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """One rank's step by use: busy + exposed + bubble = step.

    Attributes:
        exposed_s: for each lane, the compute waiting while that lane works on what it needs. Tie and ReducePartial are
            sums
        that overlap nothing, so they count here, under reduce.
        bubble_s: the compute waiting for another rank.
    """

    busy_s: float
    exposed_s: dict[Lane, float]
    bubble_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step that ran, or would run. ``events``: in the order of their start."""

    program: Program
    events: tuple[TimelineEvent, ...]

    @property
    def start_s(self) -> float:
        return min((e.start_s for e in self.events), default=0.0)

    @property
    def end_s(self) -> float:
        return max((e.end_s for e in self.events), default=0.0)

    @property
    def step_s(self) -> float:
        return self.end_s - self.start_s

    def of(self, rank: int) -> list[TimelineEvent]:
        """One rank's events, in the order of issue."""
        return sorted((e for e in self.events if e.rank == rank), key=lambda e: e.index)

    def measure_uses(self) -> tuple[StepBreakdown, ...]:
        """Each pipeline rank's step by use."""
        return tuple(
            _time_spent(events, waits) for events, waits in zip(self._of_ranks(), self.find_waits(), strict=True)
        )

    def find_waits(self) -> tuple[tuple[Wait, ...], ...]:
        """The waits of every rank, in one pass over the events."""
        needs, start_s, end_s = Needs(self.program), self.start_s, self.end_s
        return tuple(tuple(_waits(events, needs, start_s, end_s)) for events in self._of_ranks())

    def _of_ranks(self) -> list[list[TimelineEvent]]:
        """Each rank's events, in the order of issue."""
        of_rank: list[list[TimelineEvent]] = [[] for _ in range(self.program.pp)]
        for e in sorted(self.events, key=lambda e: e.index):
            of_rank[e.rank].append(e)
        return of_rank

    def bubble(self) -> float:
        """Idle over busy time of all ranks: the papers' bubble over ideal time, (p-1)/m for 1F1B."""
        spent = self.measure_uses()
        busy_s = sum(s.busy_s for s in spent)
        return sum(s.bubble_s for s in spent) / busy_s if busy_s else 0.0

    def waits(self, rank: int) -> Iterator[Wait]:
        """The rank's waits, each with its lane."""
        return _waits(self.of(rank), Needs(self.program), self.start_s, self.end_s)


def _waits(events: Sequence[TimelineEvent], needs: Needs, start_s: float, end_s: float) -> Iterator[Wait]:
    """The waits of one rank, given its events in the order of issue."""
    came: dict[Arrival, tuple[Channel, int]] = {}
    runs: dict[Channel, list[TimelineEvent]] = {}
    clock_s = start_s
    for e in events:
        if e.lane != "compute":
            run = runs.setdefault(_channel(e), [])
            run.append(e)
            if arrival := brings(e.instruction):
                came[arrival] = (_channel(e), len(run))
        elif not isinstance(e.instruction, ins.Free):
            if clock_s < e.start_s:
                needed = [came[a] for a in needs(e.instruction) if a in came]
                # The compute waits for what arrives last, whose channel first works off what lies ahead.
                ahead = [_since(clock_s, runs[channel], count) for channel, count in needed]
                last = max(ahead, key=lambda run: run[-1].end_s if run else 0.0, default=[])
                yield from _split(clock_s, e.start_s, last)
            clock_s = max(clock_s, e.end_s)
    yield from _split(clock_s, end_s, [])


def _time_spent(events: Sequence[TimelineEvent], waits: Sequence[Wait]) -> StepBreakdown:
    """One rank's step by use."""
    busy_s = bubble_s = 0.0
    exposed_s: dict[Lane, float] = dict.fromkeys(EXPOSED, 0.0)
    for e in events:
        if isinstance(e.instruction, ins.Tie | ins.ReducePartial):
            exposed_s["reduce"] += e.end_s - e.start_s
        elif e.lane == "compute":
            busy_s += e.end_s - e.start_s
    for wait in waits:
        if wait.lane:
            exposed_s[wait.lane] += wait.end_s - wait.start_s
        else:
            bubble_s += wait.end_s - wait.start_s
    return StepBreakdown(busy_s, exposed_s, bubble_s)


def _channel(event: TimelineEvent) -> Channel:
    i = event.instruction
    match i:
        case ins.Send(peer=peer) | ins.Recv(peer=peer):
            return event.lane, type(i).__name__, peer
        case _:
            return event.lane, "", None


def _split(start_s: float, end_s: float, run: Sequence[TimelineEvent]) -> Iterator[Wait]:
    """A wait in pieces: with and without events of a channel."""
    at_s = start_s
    for e in run:
        if at_s < min(e.start_s, end_s):
            yield Wait(at_s, min(e.start_s, end_s), None)
            at_s = e.start_s
        if at_s < min(e.end_s, end_s):
            yield Wait(at_s, min(e.end_s, end_s), e.lane)
            at_s = e.end_s
    if at_s < end_s:
        yield Wait(at_s, end_s, None)


def _since(start_s: float, run: Sequence[TimelineEvent], count: int) -> list[TimelineEvent]:
    """Of the first ``count`` events of a channel, those that were not over at ``start_s``."""
    first = count
    while first and run[first - 1].end_s > start_s:
        first -= 1
    return list(run[first:count])

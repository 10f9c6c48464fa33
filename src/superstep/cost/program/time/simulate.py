"""simulate: the program on a clock.

Each rank issues its instructions in order; the next one is issued when the compute before it has finished. A fetch or a
reduction starts when it is issued and its lane is free, a reload not before its offload has ended. A transfer starts
when it is sent, its receive is posted and its channel (from, to, wire) is free. Compute starts when all its inputs have
arrived. A tie or a step starts when all of its ranks have reached it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Lane, Program, Wire, lane
from superstep.program.issue_order import issue_order
from superstep.program.timeline import Arrival, Needs, Timeline, TimelineEvent, brings

Place: TypeAlias = tuple[int, int]
Channel: TypeAlias = tuple[int, int, Wire]


class Durations(Protocol):
    """Seconds of an instruction on a pipeline rank. A transfer takes those of its Send."""

    def __call__(self, instruction: Instruction, rank: int, /) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """One unit's seconds.

    Attributes:
        backward_s: the whole backward pass.
        again_s: what it takes longer where selective recomputation computes a part of the unit again, and
            ``backward_s`` has nothing of that.
        weight_s: the seconds of BackwardWeight; BackwardInput takes the rest of ``backward_s``.
        transfer_s: the transfer of its input, or of the input's gradient, between two ranks.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    again_s: float = 0.0
    recompute_s: float = 0.0
    fetch_s: float = 0.0
    reduce_s: float = 0.0
    settle_s: float = 0.0
    replicas_s: float = 0.0
    tie_s: float = 0.0
    transfer_s: float = 0.0
    snapshot_s: float = 0.0
    offload_s: float = 0.0
    reload_s: float = 0.0

    def of(self, instruction: Instruction) -> float:  # noqa: C901 - one case for each instruction
        match instruction:
            case ins.Forward():
                return self.forward_s
            case ins.Recompute():
                return self.recompute_s
            case ins.Backward():
                return self.backward_s
            case ins.BackwardInput():
                return self.backward_s - self.weight_s
            case ins.BackwardWeight():
                return self.weight_s
            case ins.Fetch():
                return self.fetch_s
            case ins.Reduce():
                return self.reduce_s
            case ins.Settle():
                return self.settle_s
            case ins.ReduceReplicas():
                return self.replicas_s
            case ins.Tie():
                return self.tie_s
            case ins.Send() | ins.Recv():
                return self.transfer_s
            case ins.Snapshot():
                return self.snapshot_s
            case ins.Offload():
                return self.offload_s
            case ins.Reload():
                return self.reload_s
            case _:
                return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PerUnit:
    """Durations that depend only on the unit.

    Attributes:
        selective: the units and microbatches of which the backward pass takes ``again_s`` longer.
    """

    units: tuple[UnitSeconds, ...]
    selective: frozenset[tuple[int, int]] = frozenset()
    reduce_partial_s: float = 0.0
    step_s: float = 0.0

    def __call__(self, instruction: Instruction, rank: int, /) -> float:
        match instruction:
            case ins.ReducePartial():
                return self.reduce_partial_s
            case ins.Step():
                return self.step_s
            case ins.Free():
                return 0.0
            case ins.Backward(unit, m) | ins.BackwardInput(unit, m) if (unit, m) in self.selective:
                return self.units[unit].of(instruction) + self.units[unit].again_s
            case _:
                return self.units[instruction.unit].of(instruction)


def simulate(program: Program, durations: Durations) -> Timeline:
    """When each instruction of a checked program would run; the clock starts at 0. Raises InvalidProgram if some
    ranks wait forever.
    """
    run = _Run(program, durations)
    for places in issue_order(program):
        run.issue(places)
    return Timeline(program, tuple(sorted(run.events, key=lambda e: (e.start_s, e.rank, e.index))))


class _Run:
    """The clocks of all ranks, lanes and channels."""

    def __init__(self, program: Program, durations: Durations) -> None:
        self.program = program
        self.durations = durations
        self.events: list[TimelineEvent] = []
        self.clock_s = [0.0] * program.pp
        self.lane_free_s: dict[tuple[int, Lane], float] = {}
        self.channel_free_s: dict[Channel, float] = {}
        self.came_s: list[dict[Arrival, float]] = [{} for _ in range(program.pp)]
        self.waiting: dict[tuple[Channel, int, int], tuple[Place, Instruction, float]] = {}
        self.waits_for = Needs(program)

    def issue(self, places: tuple[Place, ...]) -> None:
        """Run one instruction, on all of its places."""
        place = places[0]
        i = self.program.ranks[place[0]][place[1]]
        match i:
            case ins.Fetch() | ins.Reduce() | ins.ReduceReplicas() | ins.Snapshot() | ins.Offload() | ins.Reload():
                self._beside(place, i)
            case ins.Send() | ins.Recv():
                self._transfer(place, i)
            case _:
                self._compute(places, i)

    def _compute(self, places: tuple[Place, ...], i: Instruction) -> None:
        needed = self.waits_for(i)
        start_s = max([self._ready_s(rank, needed) for rank, _ in places])
        end_s = start_s + max([self.durations(i, rank) for rank, _ in places])
        for rank, index in places:
            self.clock_s[rank] = end_s
            self.events.append(TimelineEvent(rank, index, i, start_s, end_s))

    def _ready_s(self, rank: int, needed: Sequence[Arrival]) -> float:
        """When the rank has finished the compute before, and every input has arrived."""
        ready_s, came_s = self.clock_s[rank], self.came_s[rank]
        for arrival in needed:
            ready_s = max(ready_s, came_s.get(arrival, 0.0))
        return ready_s

    def _beside(self, place: Place, i: Instruction) -> None:
        rank = place[0]
        start_s = max(self._ready_s(rank, self.waits_for(i)), self.lane_free_s.get((rank, lane(i)), 0.0))
        end_s = start_s + self.durations(i, rank)
        self.lane_free_s[rank, lane(i)] = end_s
        self._came(place, i, start_s, end_s)

    def _transfer(self, place: Place, i: ins.Send | ins.Recv) -> None:
        """Of Send and Recv, the one that is issued first waits here for the other."""
        rank = place[0]
        channel = (rank, i.peer, i.wire) if isinstance(i, ins.Send) else (i.peer, rank, i.wire)
        other = self.waiting.pop((channel, i.unit, i.microbatch), None)
        if other is None:
            self.waiting[channel, i.unit, i.microbatch] = (place, i, self.clock_s[rank])
            return
        other_place, other_i, other_s = other
        send = i if isinstance(i, ins.Send) else other_i
        # A value that the rank only passes on must have arrived before.
        came_s = max([self.came_s[channel[0]].get(value, 0.0) for value in self.waits_for(send)])
        start_s = max(self.clock_s[rank], other_s, came_s, self.channel_free_s.get(channel, 0.0))
        end_s = start_s + self.durations(send, channel[0])
        self.channel_free_s[channel] = end_s
        self._came(place, i, start_s, end_s)
        self._came(other_place, other_i, start_s, end_s)

    def _came(self, place: Place, i: Instruction, start_s: float, end_s: float) -> None:
        if arrival := brings(i):
            self.came_s[place[0]][arrival] = end_s
        self.events.append(TimelineEvent(*place, i, start_s, end_s))

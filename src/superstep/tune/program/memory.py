"""What a program of iterations holds in memory, at every instant and however its lanes run beside each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from superstep.errors import ConfigError
from superstep.tune.program import instructions as ins
from superstep.tune.program.instructions import Instruction, Iterations, Lane, Place
from superstep.tune.program.order import clocks
from superstep.tune.program.text import describe

Where = Literal["ranks", "sampler", "trainer", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of what a run holds, each on the fullest rank.

    Attributes:
        weights: of the sampler.
        keys: of its pages.
        answering: that the sampler has besides: weights laid out for its products, what its steps make and drop.
        taking: that a version needs beside the weights in place, until it has taken it.
        training: what a trainer holds between steps: weights, gradients, moments, and the weights of a reference.
        step: what a step needs more, its activations above all.
        asleep: of the trainer's, what stays while shared ranks sample.
        kept: of the sampler's, what stays while shared ranks train.
        snapshot: of one version, on the host.
        group: of one group's answers, on the host, from their draw to their step.
    """

    weights: int = 0
    keys: int = 0
    answering: int = 0
    taking: int = 0
    training: int = 0
    step: int = 0
    asleep: int = 0
    kept: int = 0
    snapshot: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class PeakUse:
    """The most bytes that are held in a place while one instruction runs."""

    where: Where
    at: Place
    bytes: int


def memory(program: Iterations, sizes: Sizes) -> list[PeakUse]:
    """The bytes of every instruction: of the ranks that do it, and of the host where it puts something there.

    What the ranks of a lane hold follows from that lane alone. What lies on the host is the most over all orders in
    which the lanes may run.
    """
    uses = [held for lane, all_of in program.lanes for held in _lane(lane, all_of, sizes)]
    return uses + _host(program, sizes)


def peaks(program: Iterations, sizes: Sizes) -> dict[Where, PeakUse]:
    """For each place the instruction that holds most."""
    peak_uses: dict[Where, PeakUse] = {}
    for held in memory(program, sizes):
        if held.where not in peak_uses or held.bytes > peak_uses[held.where].bytes:
            peak_uses[held.where] = held
    return peak_uses


def require_room(program: Iterations, sizes: Sizes, room: Mapping[Where, int]) -> None:
    """Refuse a program that some place has no room for, before it begins.

    Raises:
        ConfigError: names the instruction that needs most, and what it needs.
    """
    for where, held in peaks(program, sizes).items():
        if where in room and held.bytes > room[where]:
            i = program.lane(held.at[0])[held.at[1]]
            raise ConfigError(
                f"rollout.placement = '{program.asked.placement}': '{describe(i)}' needs {held.bytes:,} bytes of the "
                f"{where}, which has {room[where]:,}; {_mend(i)}."
            )


def _mend(i: Instruction) -> str:
    match i:
        case ins.Train():
            return "set a smaller plan.microbatch, a higher plan.zero, or plan.recompute"
        case ins.Publish():
            return "set a smaller rl.lag"
        case _:
            return "set fewer rollout.pages, or a smaller rollout.max_tokens"


def _lane(lane: Lane, instructions: Sequence[Instruction], s: Sizes) -> list[PeakUse]:
    training, sampling = s.training + s.kept, s.asleep + s.weights + s.keys + s.answering
    match lane:
        case "grader":
            return []
        case "sampler":
            return [PeakUse("sampler", (lane, at), _sampling(i, s)) for at, i in enumerate(instructions)]
        case "trainer":
            return [
                PeakUse("trainer", (lane, at), s.training + (s.step if isinstance(i, ins.Train) else 0))
                for at, i in enumerate(instructions)
            ]
        case "ranks":
            uses = []
            now = training
            for at, i in enumerate(instructions):
                peak = now
                match i:
                    case ins.Swap(to):
                        now = sampling if to == "sample" else training
                        # The one gives its memory back before the other takes its own.
                        peak = max(peak, now)
                    case ins.Train():
                        peak = now + s.step
                    case ins.Take():
                        peak = now + s.taking
                    case _:
                        pass
                uses.append(PeakUse("ranks", (lane, at), peak))
            return uses


def _sampling(i: Instruction, s: Sizes) -> int:
    return s.weights + s.keys + s.answering + (s.taking if isinstance(i, ins.Take) else 0)


def _host(program: Iterations, sizes: Sizes) -> list[PeakUse]:
    """After each publish and each sample, the versions that may be there and the groups that may wait to be trained.

    That is what can have come by then in some run, less what has gone by then in every run: the most of each, though
    perhaps not of both at one instant.
    """
    clock = clocks(program)
    brings = {lane: _counts(program.lane(lane), (ins.Publish, ins.Sample)) for lane, _ in program.lanes}
    takes = {lane: _counts(program.lane(lane), (ins.Retire, ins.Train)) for lane, _ in program.lanes}
    cursor, groups_of_a_step = program.cursor, program.asked.groups
    known = {
        (lane, other): [clock[lane, at].get(other, 0) for at in range(len(instructions))]
        for lane, instructions in program.lanes
        for other, _ in program.lanes
    }
    uses = []
    for place, i in program:
        if not isinstance(i, ins.Publish | ins.Sample):
            continue
        versions, groups = len(cursor.published), len(cursor.recorded)
        for lane, _ in program.lanes:
            # Clocks grow along a lane, so what comes after the place in every run is the lane's end.
            come = place[1] + 1 if lane == place[0] else bisect_right(known[lane, place[0]], place[1])
            gone = clock[place].get(lane, 0)
            versions += brings[lane][come][0] - takes[lane][gone][0]
            groups += brings[lane][come][1] - takes[lane][gone][1] * groups_of_a_step
        uses.append(PeakUse("host", place, versions * sizes.snapshot + groups * sizes.group))
    return uses


def _counts(instructions: Sequence[Instruction], kinds: tuple[type[Instruction], ...]) -> list[tuple[int, ...]]:
    """How many instructions of each kind there are among the first n, for every n."""
    counts = [(0,) * len(kinds)]
    for i in instructions:
        counts.append(tuple(n + isinstance(i, kind) for n, kind in zip(counts[-1], kinds, strict=True)))
    return counts

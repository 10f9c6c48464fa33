"""Memory of a program of iterations, at every instant and for any interleaving of its lanes."""

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
    """Bytes of a run's parts, each on the fullest rank.

    Attributes:
        weights: of the sampler.
        keys: of its KV cache.
        answering: of the sampler in addition: weights laid out for its products, temporaries of its steps.
        taking: that a new version needs beside the current weights, until it is installed.
        training: of a trainer between steps: weights, gradients, moments, and the weights of a reference.
        step: in addition during a step, mostly activations.
        asleep: of the trainer, while shared ranks sample.
        kept: of the sampler, while shared ranks train.
        snapshot: of one version, on the host.
        group: of one group's answers, on the host, from sampling to training.
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
    """The most bytes in a place while one instruction runs."""

    where: Where
    at: Place
    bytes: int


def memory(program: Iterations, sizes: Sizes) -> list[PeakUse]:
    """The bytes of every instruction: on its ranks, and on the host where it adds something there.

    The memory of a lane's ranks follows from that lane alone. On the host it is the maximum over all interleavings of
    the lanes.
    """
    uses = [held for lane, all_of in program.lanes for held in _lane(lane, all_of, sizes)]
    return uses + _host(program, sizes)


def peaks(program: Iterations, sizes: Sizes) -> dict[Where, PeakUse]:
    """For each place, the instruction with the most bytes."""
    peak_uses: dict[Where, PeakUse] = {}
    for held in memory(program, sizes):
        if held.where not in peak_uses or held.bytes > peak_uses[held.where].bytes:
            peak_uses[held.where] = held
    return peak_uses


def require_room(program: Iterations, sizes: Sizes, room: Mapping[Where, int]) -> None:
    """Check a program's memory before it begins.

    Raises:
        ConfigError: a place has too little memory; names the instruction that needs most, and its bytes.
    """
    for where, held in peaks(program, sizes).items():
        if where in room and held.bytes > room[where]:
            i = program.lane(held.at[0])[held.at[1]]
            raise ConfigError(
                f"rollout.placement = '{program.schedule.placement}': '{describe(i)}' needs {held.bytes:,} bytes of "
                f"the {where}, which has {room[where]:,}; {_mend(i)}."
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
                        # One role frees its memory before the other allocates its own.
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
    """After each publish and each sample, the most versions that may exist, and the most groups that may wait for
    training.

    That is what may have come by then in some run, less what is gone by then in every run: the maximum of each, though
    perhaps not of both at one instant.
    """
    clock = clocks(program)
    brings = {lane: _counts(program.lane(lane), (ins.Publish, ins.Sample)) for lane, _ in program.lanes}
    takes = {lane: _counts(program.lane(lane), (ins.Retire, ins.Train)) for lane, _ in program.lanes}
    cursor, groups_of_a_step = program.cursor, program.schedule.groups
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
            # Clocks grow along a lane, so the end of the lane has everything that comes after the place in every run.
            come = place[1] + 1 if lane == place[0] else bisect_right(known[lane, place[0]], place[1])
            gone = clock[place].get(lane, 0)
            versions += brings[lane][come][0] - takes[lane][gone][0]
            groups += brings[lane][come][1] - takes[lane][gone][1] * groups_of_a_step
        uses.append(PeakUse("host", place, versions * sizes.snapshot + groups * sizes.group))
    return uses


def _counts(instructions: Sequence[Instruction], kinds: tuple[type[Instruction], ...]) -> list[tuple[int, ...]]:
    """Counts of each kind among the first n instructions, for every n."""
    counts = [(0,) * len(kinds)]
    for i in instructions:
        counts.append(tuple(n + isinstance(i, kind) for n, kind in zip(counts[-1], kinds, strict=True)))
    return counts

"""simulate: the seconds of a program of iterations before it runs, and the idle times of its lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superstep.tune.program import instructions as ins
from superstep.tune.program.instructions import Instruction, Iterations, Lane, Place
from superstep.tune.program.order import issue_order


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionRates:
    """Seconds of each instruction.

    Attributes:
        sample_s: of a group, in a batch of usual size.
        grade_s: of a group.
        train_s: of a step.
        publish_s: of a snapshot.
        take_s: until the sampler has it.
        save_s: of a checkpoint.
        swap_s: of shared ranks.
    """

    sample_s: float
    grade_s: float
    train_s: float
    publish_s: float = 0.0
    take_s: float = 0.0
    save_s: float = 0.0
    swap_s: float = 0.0

    def of(self, i: Instruction) -> float:
        match i:
            case ins.Sample():
                return self.sample_s
            case ins.Grade():
                return self.grade_s
            case ins.Train():
                return self.train_s
            case ins.Publish():
                return self.publish_s
            case ins.Take():
                return self.take_s
            case ins.Save():
                return self.save_s
            case ins.Swap():
                return self.swap_s
            case ins.Retire():
                return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedProgram:
    """A simulated program.

    Attributes:
        spans: start and end of each instruction, in seconds.
        seconds: in all.
        busy_s: of each lane.
    """

    spans: Mapping[Place, tuple[float, float]]
    seconds: float
    busy_s: Mapping[Lane, float]

    def bubble(self, lane: Lane) -> float:
        """The share of the time in which a lane waits for others."""
        return 1.0 - self.busy_s[lane] / self.seconds if self.seconds else 0.0


def simulate(program: Iterations, rates: InstructionRates) -> SimulatedProgram:
    """Simulate: each instruction begins once its lane is free and its dependencies have ended."""
    spans: dict[Place, tuple[float, float]] = {}
    free: dict[Lane, float] = {lane: 0.0 for lane, _ in program.lanes}
    busy: dict[Lane, float] = dict(free)
    for place in issue_order(program):
        lane, at = place
        i = program.lane(lane)[at]
        begin = max([free[lane], *(spans[program.places[used]][1] for used in program.uses(i))])
        spans[place] = begin, begin + rates.of(i)
        free[lane] = begin + rates.of(i)
        busy[lane] += rates.of(i)
    return SimulatedProgram(spans=spans, seconds=max(free.values(), default=0.0), busy_s=busy)

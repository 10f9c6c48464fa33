"""Post-training by reinforcement learning as a value: the instructions of a run, in lanes.

*Version* v is the weights after v steps of training; *group* g is a task that is answered several times, the group's
answers being compared with each other. Step s trains on the groups from s·G on, G to a step. With lag 1 and G = 2,
where sampler and trainer have ranks of their own:

    sampler   take v0  sample g0 v0  sample g1 v0  sample g2 v0  sample g3 v0  retire v0  take v1  sample g4 v1 ...
    grader             grade g0      grade g1      grade g2      grade g3      grade g4 ...
    trainer   publish v0  train s0  save s1  publish v1  train s1  save s2  publish v2 ...

A lane does its instructions one after the other. What one waits for on another lane follows from what it uses, and is
told by ``uses``. Which version samples which group is written down, not found out: whatever the clock does, a run and
its repetition train on the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from superstep.errors import ConfigError, SuperstepError

Placement = Literal["shared", "apart"]
Role = Literal["sample", "train"]
Lane = Literal["ranks", "sampler", "grader", "trainer"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Answer a group's task, with the weights of a version; the answers go on record."""

    group: int
    version: int


@dataclass(frozen=True, slots=True)
class Grade:
    """Have a group's answers graded; the grades go on record."""

    group: int


@dataclass(frozen=True, slots=True)
class Train:
    """One step on the groups of that step: version ``step`` becomes version ``step`` + 1."""

    step: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the trainer's weights as a snapshot."""

    version: int


@dataclass(frozen=True, slots=True)
class Take:
    """Put a published version's weights into the sampler's place."""

    version: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Remove a snapshot: nobody will take it again, not after a restart either."""

    version: int


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the trainer's whole state after so many steps: where a restart begins."""

    step: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Shared ranks change what they do: memory of the one is given back, that of the other taken."""

    to: Role


Instruction: TypeAlias = Sample | Grade | Train | Publish | Take | Retire | Save | Swap
Place: TypeAlias = tuple[Lane, int]


class InvalidIterations(SuperstepError):
    """A program of iterations breaks a rule; the message names lane, position and instruction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSchedule:
    """What is asked of a run.

    Attributes:
        steps: of training, all of them.
        groups: that a step trains on.
        lag: the most versions that the sampler's weights may be older than those that are trained; 0 is on policy.
        placement: shared: the same ranks sample and train in turn; apart: others do.
        save_every: steps between two saves; the last step is followed by one.
    """

    steps: int
    groups: int
    lag: int = 0
    placement: Placement = "shared"
    save_every: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (
            ("train.steps", self.steps, 1),
            ("rl.groups", self.groups, 1),
            ("rl.lag", self.lag, 0),
            ("state.save_every", self.save_every, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} = {value} must be at least {least}.")
        if self.placement not in ("shared", "apart"):
            raise ConfigError(f"rollout.placement = '{self.placement}' is none; choose shared or apart.")

    def step_of(self, group: int) -> int:
        """The step that trains on a group."""
        return group // self.groups

    def groups_of(self, step: int) -> range:
        """The groups that a step trains on."""
        return range(step * self.groups, (step + 1) * self.groups)

    def version_of(self, group: int) -> int:
        """The version that samples a group: a function of the group alone, so that a restart finds the same.

        Shared ranks sample for ``lag`` + 1 steps at once, and swap once for all of them; ranks of their own sample as
        far ahead as they may.
        """
        step = self.step_of(group)
        return step - step % (self.lag + 1) if self.placement == "shared" else max(0, step - self.lag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a run stands: all that a restart needs to know.

    Attributes:
        step: that the saved state has finished.
        recorded: groups from that step on whose answers are on record.
        published: versions whose snapshots are there.
    """

    step: int = 0
    recorded: frozenset[int] = frozenset()
    published: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Iterations:
    """What is left of a run, as a program.

    Attributes:
        asked: of the whole run.
        cursor: where it begins.
        lanes: the instructions of each.
    """

    asked: RlSchedule
    cursor: Cursor
    lanes: tuple[tuple[Lane, tuple[Instruction, ...]], ...]

    def __iter__(self) -> Iterator[tuple[Place, Instruction]]:
        """Every instruction with its place, lane by lane."""
        return (((lane, at), i) for lane, instructions in self.lanes for at, i in enumerate(instructions))

    @cached_property
    def places(self) -> dict[Instruction, Place]:
        """Where an instruction is; of ``Swap``, which comes often, one of the places."""
        return {i: place for place, i in self}

    def lane(self, name: Lane) -> tuple[Instruction, ...]:
        """The instructions of a lane; none where there is no such lane."""
        return dict(self.lanes).get(name, ())

    def uses(self, i: Instruction) -> tuple[Instruction, ...]:
        """What must have ended, on whichever lane, before the instruction can begin; its own lane's order is besides.

        What the cursor has on record needs no instruction.
        """
        match i:
            case Sample(_, version):
                return (Take(version),)
            case Grade(group):
                return () if group in self.cursor.recorded else (Sample(group, self.asked.version_of(group)),)
            case Train(step):
                before = (Train(step - 1),) if step > self.cursor.step else ()
                return (*before, *(Grade(group) for group in self.asked.groups_of(step)))
            case Publish(version) | Save(version):
                return (Train(version - 1),) if version > self.cursor.step else ()
            case Take(version):
                return () if version in self.cursor.published else (Publish(version),)
            case Retire() | Swap():
                return ()

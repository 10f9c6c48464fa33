"""Reinforcement learning as a value: the instructions of a run, in lanes.

*Version* v is the weights after v steps of training; *group* g is a task that is answered several times, with the
answers compared with each other. Step s trains on the groups from s·G on, G to a step. With lag 1 and G = 2, where
sampler and trainer have ranks of their own:

    sampler   take v0  sample g0 v0  sample g1 v0  sample g2 v0  sample g3 v0  retire v0  take v1  sample g4 v1 ...
    grader             grade g0      grade g1      grade g2      grade g3      grade g4 ...
    trainer   publish v0  train s0  save s1  publish v1  train s1  save s2  publish v2 ...

A lane runs its instructions in sequence. Dependencies on other lanes follow from what an instruction uses (``uses``).
The program says which version samples which group: independent of timing, a run and its repetition train on the same
tokens.
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
    """Answer a group's task, with the weights of a version, and record the answers."""

    group: int
    version: int


@dataclass(frozen=True, slots=True)
class Grade:
    """Grade a group's answers, and record the grades."""

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
    """Install a published version's weights in the sampler."""

    version: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Remove a snapshot that is not needed any more, not even after a restart."""

    version: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of the trainer after this many steps: where a restart begins."""

    step: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Shared ranks change their role: the memory of one is freed, that of the other allocated."""

    to: Role


Instruction: TypeAlias = Sample | Grade | Train | Publish | Take | Retire | Save | Swap
Place: TypeAlias = tuple[Lane, int]


class InvalidIterations(SuperstepError):
    """A program of iterations breaks a rule; the message names lane, position and instruction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSchedule:
    """The schedule of a run.

    Attributes:
        steps: of training, in all.
        groups: that a step trains on.
        lag: the most versions that the sampler's weights may be older than the trained ones; 0 is on policy.
        placement: shared: the same ranks sample and train in turn; apart: others do.
        save_every: steps between two saves; the last step is followed by one.
        gaps: steps before which tasks are left out.
    """

    steps: int
    groups: int
    lag: int = 0
    placement: Placement = "shared"
    save_every: int = 1
    gaps: tuple[int, ...] = ()

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
        """The version that samples a group: a function of the group alone, so that a restart gives the same.

        Shared ranks sample for ``lag`` + 1 steps at once, and swap once for all of them; ranks of their own sample as
        far ahead as they may. Groups behind a gap are sampled by its version or a later one.
        """
        step = self.step_of(group)
        first = max((gap for gap in self.gaps if gap <= step), default=0)
        return step - (step - first) % (self.lag + 1) if self.placement == "shared" else max(first, step - self.lag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The progress of a run, sufficient for a restart.

    Attributes:
        step: number of steps in the saved state.
        recorded: groups from that step on with recorded answers.
        published: versions with existing snapshots.
    """

    step: int = 0
    recorded: frozenset[int] = frozenset()
    published: frozenset[int] = frozenset()

    def version_of(self, group: int, schedule: RlSchedule) -> int:
        """The version that samples a group that is left: that of the schedule. A run that is continued behind its last
        step has no older versions any more, and samples with the weights from which it goes on.
        """
        version = schedule.version_of(group)
        return version if version >= self.step or version in self.published else self.step


@dataclass(frozen=True, kw_only=True)
class Iterations:
    """The rest of a run, as a program.

    Attributes:
        schedule: the schedule of the whole run.
        cursor: where it begins.
        lanes: the instructions of each.
    """

    schedule: RlSchedule
    cursor: Cursor
    lanes: tuple[tuple[Lane, tuple[Instruction, ...]], ...]

    def __iter__(self) -> Iterator[tuple[Place, Instruction]]:
        """Every instruction with its place, lane by lane."""
        return (((lane, at), i) for lane, instructions in self.lanes for at, i in enumerate(instructions))

    @cached_property
    def places(self) -> dict[Instruction, Place]:
        """The place of each instruction; one of the places of a repeated ``Swap``."""
        return {i: place for place, i in self}

    def lane(self, name: Lane) -> tuple[Instruction, ...]:
        """The instructions of a lane; empty for an absent lane."""
        return dict(self.lanes).get(name, ())

    def version_of(self, group: int) -> int:
        """The version that samples a group that is left."""
        return self.cursor.version_of(group, self.schedule)

    def uses(self, i: Instruction) -> tuple[Instruction, ...]:
        """Instructions, on any lane, that must end before this one can begin; in addition to the order of its own lane.

        Recorded work needs no instruction.
        """
        match i:
            case Sample(_, version):
                return (Take(version),)
            case Grade(group):
                return () if group in self.cursor.recorded else (Sample(group, self.version_of(group)),)
            case Train(step):
                before = (Train(step - 1),) if step > self.cursor.step else ()
                return (*before, *(Grade(group) for group in self.schedule.groups_of(step)))
            case Publish(version) | Save(version):
                return (Train(version - 1),) if version > self.cursor.step else ()
            case Take(version):
                return () if version in self.cursor.published else (Publish(version),)
            case Retire() | Swap():
                return ()

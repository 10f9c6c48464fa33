"""The check of a program of iterations: its rules hold for any interleaving of its lanes.

Each group without a record is sampled once, with the version that its position in the run requires, at most ``lag``
steps old. Each group is graded once; each step is trained once, in order. A snapshot is taken only after it is
published, and is removed only when a restart cannot need it any more. Shared ranks run only instructions for which they
have the memory. No lane waits forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from superstep.tune.program import instructions as ins
from superstep.tune.program.instructions import Instruction, InvalidIterations, Iterations, Lane, Role
from superstep.tune.program.order import clocks, is_before
from superstep.tune.program.text import describe

_KINDS: dict[Lane, tuple[type[Instruction], ...]] = {
    "ranks": (ins.Sample, ins.Train, ins.Publish, ins.Take, ins.Retire, ins.Save, ins.Swap),
    "sampler": (ins.Sample, ins.Take, ins.Retire),
    "grader": (ins.Grade,),
    "trainer": (ins.Train, ins.Publish, ins.Save),
}
_LANES: dict[str, tuple[Lane, ...]] = {"shared": ("ranks", "grader"), "apart": ("sampler", "grader", "trainer")}


def check(program: Iterations) -> Iterations:
    """The same program, if it satisfies every rule.

    Raises:
        InvalidIterations: naming the first lane and instruction that breaks a rule, and the rule.
    """
    names = tuple(lane for lane, _ in program.lanes)
    if names != _LANES[program.schedule.placement]:
        wanted = ", ".join(_LANES[program.schedule.placement])
        raise InvalidIterations(
            f"placement {program.schedule.placement} has the lanes {wanted}, not {', '.join(names)}"
        )
    for lane, instructions in program.lanes:
        state = _Lane(program, lane)
        for at, i in enumerate(instructions):
            if broken := state.run(i):
                raise InvalidIterations(f"{lane}, instruction {at} ({describe(i)}): {broken}")
        if state.role == "sample":
            raise InvalidIterations(f"{lane}, at the end: the ranks are left to the sampler")
    for broken in _leftovers(program):
        raise InvalidIterations(broken)
    for broken in _too_early(program):
        raise InvalidIterations(broken)
    return program


class _Lane:
    """One lane, run symbolically: the rules about its own order."""

    def __init__(self, program: Iterations, lane: Lane) -> None:
        self.program = program
        self.schedule = program.schedule
        self.lane: Lane = lane
        self.role: Role | None = "train" if lane == "ranks" else None
        self.held: int | None = None
        self.trained = program.cursor.step
        self.saved = program.cursor.step
        self.issued: set[Instruction] = set()

    def run(self, i: Instruction) -> str:
        """Advance by one instruction; returns the rule that it breaks, or an empty text."""
        if not isinstance(i, _KINDS[self.lane]):
            return f"lane {self.lane} does none of these"
        if i in self.issued and not isinstance(i, ins.Swap):
            return "the same was done before"
        self.issued.add(i)
        match i:
            case ins.Sample(group, version):
                return self._away("sample") or self._sample(group, version)
            case ins.Take(version):
                self.held = version
                return self._away("sample")
            case ins.Train(step):
                return self._away("train") or self._train(step)
            case ins.Publish(version):
                return self._away("train") or self._publish(version)
            case ins.Save(step):
                return self._away("train") or self._save(step)
            case ins.Grade(group):
                return self._check_known(group)
            case ins.Swap(to):
                return self._swap(to)
            case ins.Retire():
                return ""

    def _away(self, role: Role) -> str:
        """The error if the ranks have freed this role's memory."""
        return f"the ranks' memory is the other's; swap to '{role}' first" if self.role not in (None, role) else ""

    def _check_known(self, group: int) -> str:
        first, last = self.program.cursor.step, self.schedule.steps
        is_left = first <= self.schedule.step_of(group) < last
        return "" if is_left else f"the steps {first} to {last - 1} that are left have no such group"

    def _sample(self, group: int, version: int) -> str:
        if broken := self._check_known(group):
            return broken
        if group in self.program.cursor.recorded:
            return "the group's answers are on record; it would be sampled twice"
        age = self.schedule.step_of(group) - version
        if not 0 <= age <= self.schedule.lag:
            return f"the version is {age} steps old when it is trained on, and lag allows 0 to {self.schedule.lag}"
        if version != self.program.version_of(group):
            return f"a restart would sample the group with version {self.program.version_of(group)}"
        if version != self.held:
            held = "none" if self.held is None else f"version {self.held}"
            return f"the sampler has {held} in its place; take version {version} first"
        return ""

    def _train(self, step: int) -> str:
        if step != self.trained or step >= self.schedule.steps:
            return f"the trainer has finished {self.trained} of {self.schedule.steps} steps"
        self.trained += 1
        return ""

    def _publish(self, version: int) -> str:
        if version in self.program.cursor.published:
            return "the version is published already"
        return "" if version == self.trained else f"the trainer has version {self.trained}"

    def _save(self, step: int) -> str:
        if step != self.trained:
            return f"the trainer has finished {self.trained} steps"
        if step - self.saved > self.schedule.save_every:
            return f"{step - self.saved} steps since the last save, and save_every is {self.schedule.save_every}"
        self.saved = step
        return ""

    def _swap(self, to: Role) -> str:
        if to == self.role:
            return f"the ranks' memory is already there to {to}"
        self.role = to
        return ""


def _leftovers(program: Iterations) -> Iterator[str]:
    """Rules that the program as a whole breaks."""
    schedule, cursor = program.schedule, program.cursor
    sampled = Counter(i.group for _, i in program if isinstance(i, ins.Sample))
    published = {i.version for _, i in program if isinstance(i, ins.Publish)} | cursor.published
    retired = {i.version for _, i in program if isinstance(i, ins.Retire)}
    for step in range(cursor.step, schedule.steps):
        for group in schedule.groups_of(step):
            if group not in cursor.recorded and not sampled[group]:
                yield f"group {group} is never sampled"
            if sampled[group] > 1:
                yield f"group {group} is sampled {sampled[group]} times"
            if ins.Grade(group) not in program.places:
                yield f"group {group} is never graded"
        if ins.Train(step) not in program.places:
            yield f"step {step} is never trained"
    if cursor.step < schedule.steps and ins.Save(schedule.steps) not in program.places:
        yield "the last step is never saved"
    yield from (f"version {version} is published and never retired" for version in sorted(published - retired))
    yield from (f"version {version} is retired and was never published" for version in sorted(retired - published))


def _too_early(program: Iterations) -> Iterator[str]:
    """Snapshots that may be removed, in some interleaving, while they are still needed."""
    clock = clocks(program)
    for place, i in program:
        match i:
            case ins.Take(version) | ins.Sample(_, version):
                retired = program.places[ins.Retire(version)]
                if not is_before(clock, place, retired):
                    lane, at = retired
                    yield (
                        f"{lane}, instruction {at} (retire v{version}): it may come before {place[0]}'s instruction "
                        f"{place[1]} ({describe(i)}), which needs the snapshot, or would after a restart"
                    )
            case ins.Publish(version):
                if not is_before(clock, place, program.places[ins.Retire(version)]):
                    yield f"version {version} may be retired before it is published"
            case _:
                pass

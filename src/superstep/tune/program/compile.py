"""compile: what is asked of a run, and where it stands, become a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from superstep.tune.program.check import check
from superstep.tune.program.instructions import (
    Cursor,
    Grade,
    Instruction,
    Iterations,
    Lane,
    Publish,
    Retire,
    RlSchedule,
    Sample,
    Save,
    Swap,
    Take,
    Train,
)

START = Cursor()


def compile_iterations(schedule: RlSchedule, cursor: Cursor = START) -> Iterations:
    """What is left to do from a cursor on, checked.

    Groups on record are not sampled again, and a version that samples no other group is not published.
    """
    steps = range(cursor.step, schedule.steps)
    graded = tuple(Grade(group) for step in steps for group in schedule.groups_of(step))
    lanes: dict[Lane, tuple[Instruction, ...]]
    if schedule.placement == "shared":
        lanes = {"ranks": tuple(_share_version(schedule, cursor)), "grader": graded}
    else:
        lanes = {
            "sampler": tuple(_sampler(schedule, cursor)),
            "grader": graded,
            "trainer": tuple(_trainer(schedule, cursor)),
        }
    return check(Iterations(asked=schedule, cursor=cursor, lanes=tuple(lanes.items())))


def after(program: Iterations, done: Sequence[Instruction]) -> Cursor:
    """Where a run stands that ended after these of its instructions, however it ended."""
    step = max((i.step for i in done if isinstance(i, Save)), default=program.cursor.step)
    recorded = {i.group for i in done if isinstance(i, Sample)} | program.cursor.recorded
    published = {i.version for i in done if isinstance(i, Publish)} | program.cursor.published
    return Cursor(
        step=step,
        recorded=frozenset(group for group in recorded if program.asked.step_of(group) >= step),
        published=frozenset(published - {i.version for i in done if isinstance(i, Retire)}),
    )


def _share_version(schedule: RlSchedule, cursor: Cursor) -> Iterator[Instruction]:
    """Sampling for all steps of one version, then these steps."""
    wanted = _wanted_groups(schedule, cursor)
    yield from (Retire(version) for version in sorted(cursor.published - wanted.keys()))
    for step in range(cursor.step, schedule.steps):
        version = schedule.version_of(schedule.groups_of(step)[0])
        groups = wanted.pop(version, [])
        if groups:
            if version not in cursor.published:
                yield Publish(version)
            yield Swap("sample")
            yield Take(version)
            yield from (Sample(group, version) for group in groups)
            yield Retire(version)
            yield Swap("train")
        yield Train(step)
        yield from _save(schedule, step + 1)


def _sampler(schedule: RlSchedule, cursor: Cursor) -> Iterator[Instruction]:
    wanted = _wanted_groups(schedule, cursor)
    yield from (Retire(version) for version in sorted(cursor.published - wanted.keys()))
    for version, groups in wanted.items():
        yield Take(version)
        yield from (Sample(group, version) for group in groups)
        yield Retire(version)


def _trainer(schedule: RlSchedule, cursor: Cursor) -> Iterator[Instruction]:
    wanted = _wanted_groups(schedule, cursor).keys() - cursor.published
    if cursor.step in wanted:
        yield Publish(cursor.step)
    for step in range(cursor.step, schedule.steps):
        yield Train(step)
        # The sampler waits for the snapshot, and nobody for what is saved.
        if step + 1 in wanted:
            yield Publish(step + 1)
        yield from _save(schedule, step + 1)


def _save(schedule: RlSchedule, step: int) -> Iterator[Save]:
    if step % schedule.save_every == 0 or step == schedule.steps:
        yield Save(step)


def _wanted_groups(schedule: RlSchedule, cursor: Cursor) -> dict[int, list[int]]:
    """The groups that are still to be sampled, by version, the oldest first."""
    groups: dict[int, list[int]] = {}
    for step in range(cursor.step, schedule.steps):
        for group in schedule.groups_of(step):
            if group not in cursor.recorded:
                groups.setdefault(schedule.version_of(group), []).append(group)
    return groups

"""compile: a schedule and the run's cursor become a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from superstep.tune.program import instructions as ins
from superstep.tune.program.check import check
from superstep.tune.program.instructions import Cursor, Instruction, Iterations, Lane, RlSchedule

START = Cursor()


def compile_iterations(schedule: RlSchedule, cursor: Cursor = START) -> Iterations:
    """The remaining program from a cursor on, checked.

    Recorded groups are not sampled again, and a version without groups to sample is not published.
    """
    steps = range(cursor.step, schedule.steps)
    graded = tuple(ins.Grade(group) for step in steps for group in schedule.groups_of(step))
    lanes: dict[Lane, tuple[Instruction, ...]]
    if schedule.placement == "shared":
        lanes = {"ranks": tuple(_share_version(schedule, cursor)), "grader": graded}
    else:
        lanes = {
            "sampler": tuple(_sampler(schedule, cursor)),
            "grader": graded,
            "trainer": tuple(_trainer(schedule, cursor)),
        }
    return check(Iterations(schedule=schedule, cursor=cursor, lanes=tuple(lanes.items())))


def after(program: Iterations, done: Sequence[Instruction]) -> Cursor:
    """The cursor of a run that ended after these instructions, however it ended."""
    step = max((i.step for i in done if isinstance(i, ins.Save)), default=program.cursor.step)
    recorded = {i.group for i in done if isinstance(i, ins.Sample)} | program.cursor.recorded
    published = {i.version for i in done if isinstance(i, ins.Publish)} | program.cursor.published
    return Cursor(
        step=step,
        recorded=frozenset(group for group in recorded if program.schedule.step_of(group) >= step),
        published=frozenset(published - {i.version for i in done if isinstance(i, ins.Retire)}),
    )


def _share_version(schedule: RlSchedule, cursor: Cursor) -> Iterator[Instruction]:
    """Sampling for all steps of one version, then these steps."""
    wanted = _list_wanted_groups(schedule, cursor)
    yield from (ins.Retire(version) for version in sorted(cursor.published - wanted.keys()))
    for step in range(cursor.step, schedule.steps):
        for version in [version for version in wanted if version <= step]:
            groups = wanted.pop(version)
            if version not in cursor.published:
                yield ins.Publish(version)
            yield ins.Swap("sample")
            yield ins.Take(version)
            yield from (ins.Sample(group, version) for group in groups)
            yield ins.Retire(version)
            yield ins.Swap("train")
        yield ins.Train(step)
        yield from _save(schedule, step + 1)


def _sampler(schedule: RlSchedule, cursor: Cursor) -> Iterator[Instruction]:
    wanted = _list_wanted_groups(schedule, cursor)
    yield from (ins.Retire(version) for version in sorted(cursor.published - wanted.keys()))
    for version, groups in wanted.items():
        yield ins.Take(version)
        yield from (ins.Sample(group, version) for group in groups)
        yield ins.Retire(version)


def _trainer(schedule: RlSchedule, cursor: Cursor) -> Iterator[Instruction]:
    wanted = _list_wanted_groups(schedule, cursor).keys() - cursor.published
    if cursor.step in wanted:
        yield ins.Publish(cursor.step)
    for step in range(cursor.step, schedule.steps):
        yield ins.Train(step)
        # The sampler waits for the snapshot; nothing waits for the checkpoint.
        if step + 1 in wanted:
            yield ins.Publish(step + 1)
        yield from _save(schedule, step + 1)


def _save(schedule: RlSchedule, step: int) -> Iterator[ins.Save]:
    if step % schedule.save_every == 0 or step == schedule.steps:
        yield ins.Save(step)


def _list_wanted_groups(schedule: RlSchedule, cursor: Cursor) -> dict[int, list[int]]:
    """The groups that are still to be sampled, by version, the oldest first."""
    groups: dict[int, list[int]] = {}
    for step in range(cursor.step, schedule.steps):
        for group in schedule.groups_of(step):
            if group not in cursor.recorded:
                groups.setdefault(cursor.version_of(group, schedule), []).append(group)
    return groups

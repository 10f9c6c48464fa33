"""The rollout log: samples and grades of a run's groups, one line each, appended at once.

    rollouts.jsonl     {"group": 3, "version": 2, "answers": [...], "took_s": [1789.5, 1791.0]}
                       {"grades": 3, "verdicts": [...], "took_s": [1791.0, 1791.1]}
                       {"published": 3, "name": "...", "at_s": 1789.2}   {"retired": 2}   {"exchanged": [3, 5]}
                       {"rolled_back": 1}   {"left_out": "1:2", "groups": 2}

A killed run loses at most the line that it was writing. Recorded groups are not sampled again. Times are seconds since
1970, for display: the run does not depend on them.

A group of the program is a *place*: of a step, and of a version that samples it. The task in a place has the same
number, unless two places have exchanged theirs. Lines name tasks, except for an exchange.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from superstep.errors import StateError
from superstep.grade.task import Message, Rollout
from superstep.grade.verdict import Verdict, verdict_from_json
from superstep.observe.append_file import AppendFile
from superstep.plan.resolution.skip_and_rollback import batches_left_out
from superstep.state.fsync import sync
from superstep.tune.program.instructions import Cursor, RlSchedule
from superstep.tune.program.task_order import TaskOrder
from superstep.tune.rl.rollout import Strand, TaskAnswer
from superstep.tune.rl.sampling import TaskGroup

T = TypeVar("T")

NAME = "rollouts.jsonl"

SNAPSHOTS = "weights"
"""The folder of a run's snapshots, beside its log."""


class RolloutLog:
    """The recorded state, and its file. Thread-safe.

    Args:
        path: of the file; created if missing.
        is_kept: whether this process writes; others receive updates.

    Attributes:
        groups: by place.
        verdicts: of each graded group, likewise.
        order: of the tasks.
        skips: what is left out, in the form of ``train.skip``.
        published: the folder of each version's snapshot.
        snapshots: their parent folder.
        lock: held while a snapshot is written and recorded; none is removed meanwhile.

    Raises:
        StateError: a line is invalid.
    """

    def __init__(self, path: Path, *, is_kept: bool = True) -> None:
        self.groups: dict[int, TaskGroup] = {}
        self.verdicts: dict[int, tuple[Verdict, ...]] = {}
        self.published: dict[int, Path] = {}
        self.snapshots = path.parent / SNAPSHOTS
        self.order = TaskOrder()
        self.skips: list[str] = []
        self.lock = threading.RLock()
        if path.is_file():
            for number, line in enumerate(_lines(path), start=1):
                try:
                    self._take(json.loads(line))
                except (ValueError, KeyError, TypeError, AssertionError) as error:
                    raise StateError(
                        f"{path} is damaged in line {number} ({error!r}); resume from a copy of the run's folder."
                    ) from error
        self._file = AppendFile(path) if is_kept else None

    def cursor(self, schedule: RlSchedule, step: int) -> Cursor:
        """The cursor of a run whose saved state has finished ``step`` steps. Removed snapshots do not count."""
        return Cursor(
            step=step,
            recorded=frozenset(group for group in self.groups if step <= schedule.step_of(group) < schedule.steps),
            published=frozenset(version for version, path in self.published.items() if path.is_dir()),
        )

    def keep_answers(self, group: TaskGroup) -> None:
        """Record a group's answers."""
        self.keep(_group_record(group))

    def record_grades(self, group: int, verdicts: tuple[Verdict, ...]) -> None:
        """Record a group's grades."""
        spans = [verdict.graded_s for verdict in verdicts if verdict.graded_s is not None]
        took = (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else None
        self.keep({"grades": group, "verdicts": [verdict.to_json() for verdict in verdicts]} | _took(took))

    def exchange(self, place: int, other: int) -> None:
        """Exchange the tasks of two places, with their results."""
        self.keep({"exchanged": [place, other]})

    def go_back(self, step: int) -> None:
        """Drop samples of weights after this step: those weights will differ."""
        self.keep({"rolled_back": step})

    def leave_out(self, skip: str, groups: int) -> None:
        """Leave tasks out, and drop what was sampled of them and of later ones.

        Args:
            skip: an entry of ``train.skip``: after which step, and how many batches.
            groups: of a step, which are its batch.
        """
        self.keep({"left_out": skip, "groups": groups})

    @property
    def gaps(self) -> tuple[int, ...]:
        """Steps before which tasks are left out."""
        return tuple(sorted(batches_left_out(self.skips)))

    def task(self, place: int) -> int:
        """The number of the task in a place."""
        return self.order.task(place)

    def place(self, task: int) -> int:
        """The place of a task that is not left out."""
        place = self.order.place(task)
        assert place is not None, f"task {task} is left out"
        return place

    def publish(self, version: int, path: Path | None) -> None:
        """Record the folder of a version's snapshot; None for one that was passed in memory."""
        name = {} if path is None else {"name": path.name}
        self.keep({"published": version} | name | {"at_s": round(time.time(), 3)})

    def retire(self, version: int) -> None:
        """Record that a version is gone. The process that writes the log removes it."""
        with self.lock:
            path = self.published.get(version)
            self.keep({"retired": version})
            # Two versions of the same bits are one folder.
            if path is not None and self._file is not None and path not in self.published.values():
                shutil.rmtree(path, ignore_errors=True)

    def tidy(self) -> None:
        """Remove snapshots that a killed run did not record."""
        for path in self.snapshots.iterdir() if self.snapshots.is_dir() else ():
            if path not in self.published.values():
                shutil.rmtree(path, ignore_errors=True)

    def forget(self, groups: range) -> None:
        """Drop groups after training. They stay in the file."""
        for group in groups:
            self.groups.pop(group, None)
            self.verdicts.pop(group, None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, record: dict[str, Any]) -> None:
        with self.lock:
            if self._file is not None:
                self._file.append(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        match record:
            case {"group": int(number)}:
                self.groups[self.place(number)] = _group_of(record)
            case {"grades": int(number), "verdicts": list(verdicts)}:
                self.verdicts[self.place(number)] = tuple(verdict_from_json(each) for each in verdicts)
            case {"exchanged": [int(place), int(other)]}:
                self._exchange(place, other)
            case {"rolled_back": int(step)}:
                self._forget_versions_after(step)
            case {"left_out": str(skip), "groups": int(groups)}:
                self._leave_out(skip, groups)
            case {"published": int(version), "name": str(name)}:
                self.published[version] = self.snapshots / name
            case {"published": int()}:
                pass  # removed with its process
            case {"retired": int(version)}:
                self.published.pop(version, None)
            case _:
                raise ValueError("neither a group, grades nor a snapshot")

    def _forget_versions_after(self, step: int) -> None:
        self.published = {version: path for version, path in self.published.items() if version <= step}
        for place in [place for place, group in self.groups.items() if group.version > step]:
            self.forget(range(place, place + 1))

    def _leave_out(self, skip: str, groups: int) -> None:
        self.skips.append(skip)
        ((step, batches),) = batches_left_out([skip]).items()
        self._forget_versions_after(step)
        later = [place for place in self.groups if place >= step * groups]
        for place in later:
            self.forget(range(place, place + 1))
        self.order.leave_out(step * groups, batches * groups)

    def _exchange(self, place: int, other: int) -> None:
        self.order.exchange(place, other)
        _exchange(self.groups, place, other)
        _exchange(self.verdicts, place, other)


def _exchange(held: dict[int, T], place: int, other: int) -> None:
    exchanged = {place: held.pop(other, None), other: held.pop(place, None)}
    held |= {at: one for at, one in exchanged.items() if one is not None}


def _lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a file. An incomplete last line of a killed writer is cut off."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
        sync(path)
    yield from data[:whole].splitlines()


def _group_record(group: TaskGroup) -> dict[str, Any]:
    return {
        "group": group.number,
        "version": group.version,
        "answers": [
            {
                "strands": [
                    {"tokens": one.tokens, "spans": one.spans, "logprobs": one.logprobs} for one in answer.strands
                ],
                "turns": [[turn.role, turn.content] for turn in answer.rollout.turns],
                "finish": answer.rollout.finish,
            }
            | ({"violation": answer.rollout.violation} if answer.rollout.violation else {})
            for answer in group.answers
        ],
    } | _took(group.drawn_s)


def _took(span: tuple[float, float] | None) -> dict[str, Any]:
    """Start and end, if known."""
    return {} if span is None else {"took_s": [round(at_s, 3) for at_s in span]}


def _group_of(record: dict[str, Any]) -> TaskGroup:
    return TaskGroup(
        number=record["group"],
        version=record["version"],
        answers=tuple(
            TaskAnswer(
                strands=tuple(
                    Strand(
                        tokens=tuple(one["tokens"]),
                        spans=tuple((first, end) for first, end in one["spans"]),
                        logprobs=tuple(one["logprobs"]),
                    )
                    for one in answer["strands"]
                ),
                rollout=Rollout(
                    tuple(Message(role, text) for role, text in answer["turns"]),
                    answer["finish"],
                    answer.get("violation", ""),
                ),
            )
            for answer in record["answers"]
        ),
    )

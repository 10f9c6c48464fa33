"""The history of a run of reinforcement learning, for display: which version answered which group, and when.

Read from ``rollouts.jsonl`` and ``metrics.jsonl``, also while the run writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superstep.errors import StateError
from superstep.observe import jsonl
from superstep.plan.resolution.skip_and_rollback import batches_left_out
from superstep.tune.program.task_order import TaskOrder

Span = tuple[float, float]
"""Start and end, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredGroup:
    """A group with answers."""

    group: int
    version: int
    answers: int
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trained step.

    Attributes:
        step: finished steps, this one included.
        span: from the last grade of its groups, or from when the ranks were free.
        loss: of the step.
        reward: the mean of all graded answers.
        answers: number of graded answers.
        lost: number of answers without a grade.
        lag: number of versions by which the sampler's weights were older.
    """

    step: int
    span: Span
    loss: float | None
    reward: float | None
    answers: int
    lost: int
    lag: int


@dataclass(slots=True)
class History:
    """The recorded history.

    Attributes:
        drawn: groups by number.
        graded: times of each group's grading.
        order: of the tasks.
        published: time of each version.
        trained: the steps, in order.
        saved: times of checkpoints.
        retried: failures of graders that were repeated.
    """

    drawn: dict[int, AnsweredGroup] = field(default_factory=dict)
    graded: dict[int, Span] = field(default_factory=dict)
    order: TaskOrder = field(default_factory=TaskOrder)
    published: dict[int, float] = field(default_factory=dict)
    trained: list[Trained] = field(default_factory=list)
    saved: list[Span] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)

    def tasks_of(self, step: int, groups: int) -> list[int]:
        """Tasks of a step with this many groups; steps count from 1."""
        return [self.order.task(place) for place in range((step - 1) * groups, step * groups)]


def read_history(rollouts: Path, metrics: Path, groups: int) -> History:
    """The history in a run's two files, for steps with this many groups.

    Raises:
        StateError: a file is damaged, or has no times.
    """
    history = History()
    if rollouts.is_file():
        _each(rollouts, lambda record: _of_record(history, record))
    if metrics.is_file():
        lines = list(jsonl.read(metrics))
        spent = {line["step"]: line for line in lines if line.get("event") == "step"}
        for number, line in enumerate(lines, start=1):
            try:
                _of_metrics(history, line, spent, groups)
            except (KeyError, TypeError, ValueError) as error:
                raise _damage_error(metrics, number, error) from error
    if not (history.drawn or history.trained):
        raise StateError(
            f"'{rollouts.parent}' has nothing on record that has a time; ask again once its first groups have answers."
        )
    return history


def _each(path: Path, take: Callable[[dict[str, Any]], None]) -> None:
    """Parse every complete line. The last one may be incomplete."""
    data = path.read_bytes()
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damage_error(path, number, error) from error


def _damage_error(path: Path, number: int, error: Exception) -> StateError:
    return StateError(f"{path} is damaged in line {number} ({error!r}); view a copy of the run's folder that is whole.")


def _of_record(history: History, line: dict[str, Any]) -> None:
    match line:
        case {"group": int(group), "version": int(version), "answers": list(answers), "took_s": [begin_s, end_s]}:
            span = float(begin_s), float(end_s)
            history.drawn[group] = AnsweredGroup(group=group, version=version, answers=len(answers), span=span)
        case {"grades": int(group), "took_s": [begin_s, end_s]}:
            history.graded[group] = float(begin_s), float(end_s)
        case {"published": int(version), "at_s": at_s}:
            history.published[version] = float(at_s)
        case {"exchanged": [int(place), int(other)]}:
            history.order.exchange(place, other)
        case {"left_out": str(skip), "groups": int(groups)}:
            ((step, batches),) = batches_left_out([skip]).items()
            history.order.leave_out(step * groups, batches * groups)
        case {"rolled_back": _}:
            pass  # what is sampled again follows
        case {"group": _} | {"grades": _} | {"published": _} | {"retired": _}:
            pass  # from a version that recorded no times
        case _:
            raise ValueError("neither a group, grades nor a snapshot")


def _of_metrics(history: History, line: Mapping[str, Any], spent: Mapping[int, Mapping[str, Any]], groups: int) -> None:
    match line.get("event"):
        case "rolled" if "at_s" in line:
            step, end_s = int(line["step"]), float(line["at_s"])
            mine = history.tasks_of(step, groups)
            before = history.saved[-1:] + [each.span for each in history.trained[-1:]]
            ready = [history.graded[group] for group in mine if group in history.graded]
            begin_s = max(end_s - float(line["seconds"]), *(end for _, end in (*before, *ready)), 0.0)
            history.trained.append(
                Trained(
                    step=step,
                    span=(min(begin_s, end_s), end_s),
                    loss=spent.get(step, {}).get("loss"),
                    reward=line["reward"],
                    answers=int(line["answers"]),
                    lost=int(line["lost"]),
                    lag=int(line["lag"]),
                )
            )
        case "saved" if history.trained and history.trained[-1].step == line["step"]:
            begin_s = history.trained[-1].span[1]
            history.saved.append((begin_s, begin_s + float(line["seconds"])))
        case "retried":
            history.retried.append(str(line["why"]))

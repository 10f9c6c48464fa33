"""What a run of reinforcement learning has recorded, for people to look at: which version answered what, and when.

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

Span = tuple[float, float]
"""When something began and ended, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredGroup:
    """A group that was answered."""

    group: int
    version: int
    answers: int
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step that was trained.

    Attributes:
        step: finished steps, this one included.
        span: from the last grade of its groups on, or from when the ranks had nothing else to do.
        loss: of the step.
        reward: the mean of all answers that have a grade.
        answers: how many have.
        lost: how many have none.
        lag: how many versions older the sampler's weights were.
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
    """What is on record.

    Attributes:
        drawn: groups by number.
        graded: when each group was graded.
        tasks: in the places of the program that have exchanged theirs.
        published: when each version was.
        trained: the steps, in order.
        saved: when checkpoints were written.
        retried: what became of graders whose answers were graded again.
    """

    drawn: dict[int, AnsweredGroup] = field(default_factory=dict)
    graded: dict[int, Span] = field(default_factory=dict)
    tasks: dict[int, int] = field(default_factory=dict)
    published: dict[int, float] = field(default_factory=dict)
    trained: list[Trained] = field(default_factory=list)
    saved: list[Span] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)

    def tasks_of(self, step: int, groups: int) -> list[int]:
        """What a step of so many groups trained on; steps count from 1."""
        return [self.tasks.get(place, place) for place in range((step - 1) * groups, step * groups)]


def read_history(rollouts: Path, metrics: Path, groups: int) -> History:
    """What two files tell of a run whose steps have so many groups.

    Raises:
        StateError: a file is damaged, or nothing in it has a time.
    """
    history = History()
    if rollouts.is_file():
        _each(rollouts, lambda told: _of_record(history, told))
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
    """Every whole line. The last one may be being written."""
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
            tasks = history.tasks
            tasks[place], tasks[other] = tasks.get(other, other), tasks.get(place, place)
        case {"group": _} | {"grades": _} | {"published": _} | {"retired": _}:
            pass  # of a version that kept no times
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

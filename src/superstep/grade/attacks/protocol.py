"""Attack: makes a wrong answer to a task, which only a weak grader pays for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from superstep.grade.task import Task


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to earn a score with a wrong answer.

    Attributes:
        name: a short name for the report.
        answer: makes the answer to a task; None where the attack does not apply to the task.
        is_a_guess: whether the answer may be right by chance.
    """

    name: str
    answer: Callable[[Task], str | None]
    is_a_guess: bool = False


def always(name: str, text: str, *, is_a_guess: bool = False) -> Attack:
    """An attack that answers every task with the same text."""
    return Attack(name, lambda task: text, is_a_guess)


def prompt_text(task: Task) -> str:
    return "\n".join(message.content for message in task.messages)

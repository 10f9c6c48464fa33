"""Attack: answers that are not right, and score only where a grader is weak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from superstep.grade.task import Task


@dataclass(frozen=True, slots=True)
class Attack:
    """A way to be paid for nothing.

    Attributes:
        name: short, for the report.
        answer: what is answered to a task; None where there is nothing to try on it.
        is_a_guess: whether it may be right by chance, now and then.
    """

    name: str
    answer: Callable[[Task], str | None]
    is_a_guess: bool = False


def always(name: str, text: str, *, is_a_guess: bool = False) -> Attack:
    """The same answer to every task."""
    return Attack(name, lambda task: text, is_a_guess)


def prompt_text(task: Task) -> str:
    """The prompt as one text."""
    return "\n".join(message.content for message in task.messages)

"""Task, Rollout and what is said between: the values that an environment's file deals in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Message:
    """Something said, and by whom."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to be done, and what its grader knows of it. A function of (index, seed) alone.

    Attributes:
        prompt: what the model is told; a text is one message of the user's.
        answer: what the grader expects. It is never shown to a model or its programs.
        solution: an answer that deserves the full score, where one is known: ``grade check`` sees that it gets it.
        data: anything else that the grader needs.
    """

    prompt: tuple[Message, ...] | str
    answer: object = None
    solution: str | None = None
    data: Mapping[str, object] = field(default_factory=dict)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt, as messages."""
        return (Message("user", self.prompt),) if isinstance(self.prompt, str) else self.prompt


@dataclass(frozen=True, slots=True)
class Rollout:
    """What came of a task: what was said after its prompt, by the model and by the environment.

    Attributes:
        turns: in order; those of the model have the role ``assistant``.
        finish: ``length`` where the last turn was cut off at the most tokens.
        violation: why it is one and is not graded; empty where it is graded.
    """

    turns: tuple[Message, ...]
    finish: Finish = "stop"
    violation: str = ""

    @property
    def answer(self) -> str:
        """What the model said last; empty where it said nothing."""
        return next((turn.content for turn in reversed(self.turns) if turn.role == "assistant"), "")


def answer_rollout(text: str, finish: Finish = "stop") -> Rollout:
    """A rollout of one turn."""
    return Rollout((Message("assistant", text),), finish)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment says to a turn of the model; the model goes on."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The rollout ends here.

    Attributes:
        violation: why it is one, where it is: no ``reply`` needs to say that, for whose process it is said.
    """

    violation: str = ""

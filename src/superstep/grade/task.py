"""Task, Rollout and messages: the values of an environment's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, and what its grader knows; a function of (index, seed) alone.

    Attributes:
        prompt: a text means one message of the user.
        answer: what the grader expects; never shown to a model or its programs.
        solution: an answer that deserves the full score, if known: ``grade check`` verifies that it gets it.
        data: anything else that the grader needs.
    """

    prompt: tuple[Message, ...] | str
    answer: object = None
    solution: str | None = None
    data: Mapping[str, object] = field(default_factory=dict)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as messages."""
        return (Message("user", self.prompt),) if isinstance(self.prompt, str) else self.prompt


@dataclass(frozen=True, slots=True)
class Rollout:
    """A sampled answer: the messages after the prompt, of the model and of the environment.

    Attributes:
        turns: in order; the model's have the role ``assistant``.
        finish: ``length`` where the last turn was cut at the token limit.
        violation: why the rollout is a violation and is not graded; else empty.
    """

    turns: tuple[Message, ...]
    finish: Finish = "stop"
    violation: str = ""

    @property
    def answer(self) -> str:
        """The model's last message; empty where there is none."""
        return next((turn.content for turn in reversed(self.turns) if turn.role == "assistant"), "")


def answer_rollout(text: str, finish: Finish = "stop") -> Rollout:
    return Rollout((Message("assistant", text),), finish)


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's reply to a turn of the model, which continues."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The rollout ends here. ``violation``: why it is a violation; set by ``EnvironmentProcess``, never by
    ``reply``.
    """

    violation: str = ""

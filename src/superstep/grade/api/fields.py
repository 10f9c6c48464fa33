"""Fields of a request for grades."""

from __future__ import annotations

from typing import Literal

from superstep.grade.task import Message, Rollout
from superstep.http.body_validation import StrictBody
from superstep.http.request_error import RequestError

MOST_INDEX = 2**63 - 1
MOST_BATCH = 1024


class TurnBody(StrictBody):
    """A message after the prompt."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Item(StrictBody):
    """A rollout of a task: its turns, or its single answer."""

    index: int
    seed: int = 0
    answer: str | None = None
    turns: list[TurnBody] | None = None
    finish: Literal["stop", "length"] = "stop"

    def rollout(self, at: str = "") -> Rollout:
        """The rollout of the item at this place of the body; raises RequestError where a field is wrong."""
        for name, value in (("index", self.index), ("seed", self.seed)):
            if not 0 <= value <= MOST_INDEX:
                raise RequestError(f"{at}{name} = {value} must be from 0 to {MOST_INDEX}.", param=f"{at}{name}")
        if (self.answer is None) == (self.turns is None):
            raise RequestError(f"{at}answer or {at}turns must be given, and not both.", param=f"{at}answer")
        if self.answer is not None:
            return Rollout((Message("assistant", self.answer),), self.finish)
        return Rollout(tuple(Message(turn.role, turn.content) for turn in self.turns or ()), self.finish)


class GradeBatch(StrictBody):
    """Several rollouts to grade."""

    items: list[Item]

    def rollouts(self) -> list[Rollout]:
        """The rollout of each item; raises RequestError where their number or one of them is wrong."""
        if not 1 <= len(self.items) <= MOST_BATCH:
            raise RequestError(f"items has {len(self.items)} entries; give from 1 to {MOST_BATCH}.", param="items")
        return [item.rollout(f"items[{k}].") for k, item in enumerate(self.items)]

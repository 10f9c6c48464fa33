"""What a request for grades may ask."""

from __future__ import annotations

from typing import Literal

from superstep.grade.task import Message, Rollout
from superstep.http.body_validation import Strict
from superstep.http.request_error import RequestError

MOST_INDEX = 2**63 - 1
MOST_BATCH = 1024


class TurnBody(Strict):
    """Something said after the prompt."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Item(Strict):
    """A rollout of a task: its turns, or, where there is one alone, the answer."""

    index: int
    seed: int = 0
    answer: str | None = None
    turns: list[TurnBody] | None = None
    finish: Literal["stop", "length"] = "stop"

    def rollout(self, at: str = "") -> Rollout:
        """The rollout.

        Args:
            at: where in the body the item stands.

        Raises:
            RequestError: it has both forms or none, or a number is out of range.
        """
        for name, value in (("index", self.index), ("seed", self.seed)):
            if not 0 <= value <= MOST_INDEX:
                raise RequestError(f"{at}{name} = {value} must be from 0 to {MOST_INDEX}.", param=f"{at}{name}")
        if (self.answer is None) == (self.turns is None):
            raise RequestError(f"{at}answer or {at}turns must be given, and not both.", param=f"{at}answer")
        if self.answer is not None:
            return Rollout((Message("assistant", self.answer),), self.finish)
        return Rollout(tuple(Message(turn.role, turn.content) for turn in self.turns or ()), self.finish)


class GradeBatch(Strict):
    """Several of them."""

    items: list[Item]

    def rollouts(self) -> list[Rollout]:
        """The rollout of each.

        Raises:
            RequestError: there are none or too many, or one of them is wrong.
        """
        if not 1 <= len(self.items) <= MOST_BATCH:
            raise RequestError(f"items has {len(self.items)} entries; give from 1 to {MOST_BATCH}.", param="items")
        return [item.rollout(f"items[{k}].") for k, item in enumerate(self.items)]

"""The form of an answer, as the engine keeps to it; ``serve.text_backend`` makes them of grammars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from superstep.serve.scheduling.request import Request


class Matcher(Protocol):
    """The form of one answer, token by token."""

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow."""

    def allowed(self) -> Tensor:
        """Which tokens may come next: bool [V].

        Raises:
            ConfigError: the form is too costly at this place; the answer cannot go on.
        """

    def advance(self, token: int) -> None:
        """Goes on with a token that was allowed."""

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of some guessed tokens, from the first on, may follow; nothing changes."""

    def fork(self) -> Matcher:
        """The same place of the form, to go on from independently."""


Matchers = Callable[[Request], Matcher | None]

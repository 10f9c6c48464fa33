"""Protocol of the grammar of an answer; ``serve.text_backend`` makes the matchers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from superstep.serve.scheduling.request import Request


class Matcher(Protocol):
    """The grammar of one answer, token by token."""

    @property
    def is_done(self) -> bool:
        """Whether the answer must end here."""

    def compute_mask(self) -> Tensor:
        """The mask of allowed next tokens: bool [V].

        Raises:
            ConfigError: the grammar is too costly here; the answer cannot go on.
        """

    def advance(self, token: int) -> None:
        """Advance by an allowed token."""

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of some tokens, from the first on, are allowed; the state does not change."""

    def fork(self) -> Matcher:
        """An independent copy with the same state."""


Matchers = Callable[[Request], Matcher | None]

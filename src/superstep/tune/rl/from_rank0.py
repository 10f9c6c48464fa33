"""Results that rank 0 waits for, sent to every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from superstep.comm.objects import gather
from superstep.errors import ErrorMessage, SuperstepError
from superstep.state.all_or_none import Outcome

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")

BEAT_S = 20.0
"""Longest single wait of the other ranks: a collective has a time limit of its own."""


class WaitLimit:
    """A time limit for waiting.

    Args:
        seconds: in all.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Start again, after progress."""
        self._until_s = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return max(0.0, self._until_s - time.monotonic())


def from_first(
    rank: int,
    find: Callable[[float], T | None],
    form: TypeForm[T],
    meanwhile: Callable[[], None] = lambda: None,
) -> T:
    """Rank 0's result, on every rank. Every rank calls this together.

    Args:
        rank: of this process.
        find: waits at most the given seconds; None without a result yet. Rank 0's counts.
        form: the type of the result, of plain data.
        meanwhile: called on every rank each time there is no result yet.

    Raises:
        SuperstepError: rank 0's error, on every rank.
    """
    while True:
        mine: Outcome[T] = Outcome(None, None)
        problem: SuperstepError | None = None
        if rank == 0:
            try:
                mine = Outcome(find(BEAT_S), None)
            except SuperstepError as error:
                mine, problem = Outcome(None, ErrorMessage.of(error)), error
        first: Outcome[T] = gather(mine, Outcome[form])[0]  # type: ignore[valid-type]
        if problem is not None:
            raise problem
        if first.error is not None:
            raise first.error.error() from ConnectionAbortedError("rank 0 has failed, and reports it")
        if first.value is not None:
            return first.value
        meanwhile()

"""What rank 0 waits for and finds, on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from superstep.comm.objects import gather
from superstep.errors import SuperstepError

T = TypeVar("T")

BEAT_S = 20.0
"""How long the others are kept waiting at a time: a collective has a time limit of its own."""


class WaitLimit:
    """How long something may be waited for.

    Args:
        seconds: in all.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Wait as long again: something has come."""
        self._until_s = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        """What is left of it."""
        return max(0.0, self._until_s - time.monotonic())


def from_first(rank: int, find: Callable[[float], T | None], meanwhile: Callable[[], None] = lambda: None) -> T:
    """What rank 0 finds, on every rank. Every rank calls this together.

    Args:
        rank: of this process.
        find: waits for so many seconds at most; None where there is nothing yet. Rank 0's counts.
        meanwhile: called on every rank each time that there is nothing yet.

    Raises:
        SuperstepError: what rank 0 met instead, on every rank.
    """
    while True:
        result: T | None = None
        problem: SuperstepError | None = None
        if rank == 0:
            try:
                result = find(BEAT_S)
            except SuperstepError as error:
                problem = error
        result, problem = gather((result, problem))[0]
        if problem is not None:
            raise problem
        if result is not None:
            return result
        meanwhile()

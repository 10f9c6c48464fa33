"""Work that all ranks complete or none: one rank's failure is raised on every rank, before any of them continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from superstep.errors import Fault, SuperstepError

T = TypeVar("T")


class Peers(Protocol):
    """The ranks that save or load together."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""


def together(peers: Peers, work: Callable[[], T], describe: Callable[[Exception], SuperstepError]) -> list[T]:
    """Do the work on every rank. Every rank calls this together.

    Args:
        peers: the ranks.
        work: this rank's part; its result is sent to every rank.
        describe: converts an unexpected error to the raised one.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        SuperstepError: the error of the first rank that failed, on every rank; a Fault names that rank.
    """
    value: T | None = None
    problem: SuperstepError | None = None
    cause: Exception | None = None
    try:
        value = work()
    except SuperstepError as error:
        problem = error
    except Exception as error:  # noqa: BLE001 - whatever it is, the others wait until they are told
        problem, cause = describe(error), error
    answers: list[tuple[T | None, SuperstepError | None]] = peers.gather((value, problem))
    for rank, (_, failure) in enumerate(answers):
        if failure is not None:
            named = failure.on(rank) if isinstance(failure, Fault) and failure.rank < 0 else failure
            raise named from (cause if rank == peers.rank else None)
    return [answer for answer, _ in answers]  # type: ignore[misc]

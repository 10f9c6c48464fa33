"""Work that every rank does or none: one rank's failure becomes every rank's, before any of them goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from superstep.errors import Fault, SuperstepError

T = TypeVar("T")


class Peers(Protocol):
    """The ranks that save or load together."""

    @property
    def rank(self) -> int:
        """This one's number."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""


def together(peers: Peers, work: Callable[[], T], describe: Callable[[Exception], SuperstepError]) -> list[T]:
    """Do the work on every rank. Every rank calls this together.

    Args:
        peers: the ranks.
        work: this rank's part; what it returns is sent to every rank.
        describe: the error to raise for one that was not raised on purpose.

    Returns:
        What each rank's work returned, in rank order.

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

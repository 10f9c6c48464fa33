"""Work that all ranks complete or none: one rank's failure is raised on every rank, before any of them continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from superstep.errors import ErrorMessage, Fault, SuperstepError

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


class Peers(Protocol):
    """The ranks that save or load together."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, value: T, form: TypeForm[T]) -> list[T]:
        """Every rank's value, in rank order, on every rank. ``form``: its type, of plain data."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The result of a rank's work, or its error."""

    value: T | None
    error: ErrorMessage | None


@overload
def together(peers: Peers, work: Callable[[], None], describe: Callable[[Exception], SuperstepError]) -> list[None]: ...
@overload
def together(
    peers: Peers, work: Callable[[], T], describe: Callable[[Exception], SuperstepError], form: TypeForm[T]
) -> list[T]: ...
def together(
    peers: Peers,
    work: Callable[[], Any],
    describe: Callable[[Exception], SuperstepError],
    form: Any = None,
) -> list[Any]:
    """Do the work on every rank. Every rank calls this together.

    Args:
        peers: the ranks.
        work: this rank's part; its result is sent to every rank.
        describe: converts an unexpected error to the raised one.
        form: the type of the result, of plain data; None without one.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        SuperstepError: the error of the first rank that failed, on every rank; a Fault names that rank.
    """
    value: Any = None
    problem: SuperstepError | None = None
    cause: Exception | None = None
    try:
        value = work()
    except SuperstepError as error:
        problem = error
    except Exception as error:  # noqa: BLE001 - whatever it is, the others wait until they are told
        problem, cause = describe(error), error
    outcome = Outcome(value, None if problem is None else ErrorMessage.of(problem))
    outcomes: list[Outcome[Any]] = peers.gather(outcome, Outcome[form])
    for rank, each in enumerate(outcomes):
        if each.error is not None:
            failure = each.error.error()
            named = failure.on(rank) if isinstance(failure, Fault) and failure.rank < 0 else failure
            raise named from (cause if rank == peers.rank else None)
    return [each.value for each in outcomes]

"""What a host's launcher does: what the lead orders, one thing after the other, until the run is over."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from superstep.errors import Fault, Lost, UserError
from superstep.launch.failure import Trouble
from superstep.launch.hosts.events import AbortAll, Came, Cause, Event, Holds, Over, RanksDone, Troubled
from superstep.launch.hosts.membership import HeldStates
from superstep.launch.hosts.messages import Adrift, Fetching, Met, Orders


class HostRanks(Protocol):
    """Those of this host, and the memory that outlives them."""

    def held(self) -> HeldStates:
        """States that are whole there."""

    def fetch(self, order: Fetching) -> None:
        """Get a state of them back from another host; where that fails, nothing is held of it."""

    def run(self, given: Orders, cut: Connection, troubled: Callable[[Trouble], None]) -> bool:
        """Start them, and wait for them; whether all have come to their end. They are ended where ``cut`` can be read
        from, or where ``troubled`` is told why.
        """


def attend(
    host: int,
    name: str,
    orders: Connection,
    tell: Callable[[Event], None],
    ranks: HostRanks,
    say: Callable[[str], None],
) -> Over:
    """Do what is ordered, until the run is over.

    Args:
        host: the number of this one.
        name: what it is called.
        orders: from the lead.
        tell: the lead.
        ranks: of this host.
        say: tell the user in a line.
    """
    epoch = 0
    while True:
        match orders.recv():
            case Met():
                tell(Came(host, epoch))
                tell(Holds(host, ranks.held()))
            case Fetching() as order:
                ranks.fetch(order)
                tell(Holds(host, ranks.held()))
            case AbortAll():
                tell(Holds(host, ranks.held()))
            case Orders() as given:
                epoch = now = given.go.epoch

                def troubled(trouble: Trouble, now: int = now) -> None:
                    tell(Troubled(host, now, cause_of(trouble, name)))

                if ranks.run(given, orders, troubled):
                    tell(RanksDone(host, epoch))
            case Adrift(why):
                say(f"{why}; its ranks here are ended, and it is asked for again ...")
            case Over() as over:
                return over


def cause_of(trouble: Trouble, host: str) -> Cause:
    """Trouble of a rank, as other hosts are told of it."""
    error = trouble.error
    has_host = isinstance(error, Fault) and error.host
    text = str(error) if has_host or isinstance(error, UserError) else f"host {host}, {error}"
    is_mistake = isinstance(error, UserError)
    saved_in = error.saved_in if isinstance(error, Fault) else ""
    return Cause(text, is_lost=isinstance(error, Lost), is_mistake=is_mistake, order=trouble.order, saved_in=saved_in)


def raised(cause: Cause) -> Fault | UserError:
    """What a launcher raises where a run has ended so."""
    if cause.is_mistake:
        return UserError(cause.text)
    fault = Fault(cause.text)
    fault.saved_in = cause.saved_in
    return fault

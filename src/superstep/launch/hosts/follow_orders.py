"""A host's launcher follows the lead's orders, one after the other, until the run is over."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from superstep.errors import Fault, RankLost, UserError
from superstep.launch.failure import RankFailure
from superstep.launch.hosts.events import (
    AbortAll,
    Cause,
    HostEvent,
    HostFailed,
    HostHolds,
    HostJoined,
    RanksDone,
    RunOver,
)
from superstep.launch.hosts.membership import HeldStates
from superstep.launch.hosts.messages import Fetching, LeadLost, LeadReached, Orders


class HostRanks(Protocol):
    """The ranks of this host, and the memory that outlives them."""

    def list_held(self) -> HeldStates:
        """States that are complete in memory."""

    def fetch(self, order: Fetching) -> None:
        """Fetch their state from another host; after a failure none is held."""

    def run(self, given: Orders, cut: Connection, on_trouble: Callable[[RankFailure], None]) -> bool:
        """Start the ranks and wait for them; returns whether all finished. They are ended where ``cut`` becomes
        readable or ``on_trouble`` is called.
        """


def attend(
    host: int,
    name: str,
    orders: Connection,
    tell: Callable[[HostEvent], None],
    ranks: HostRanks,
    say: Callable[[str], None],
) -> RunOver:
    """Follow orders until the run is over.

    Args:
        host: this host's number.
        orders: from the lead.
        tell: sends an event to the lead.
        say: called with a line for the user.
    """
    epoch = 0
    while True:
        match orders.recv():
            case LeadReached():
                tell(HostJoined(host, epoch))
                tell(HostHolds(host, ranks.list_held()))
            case Fetching() as order:
                ranks.fetch(order)
                tell(HostHolds(host, ranks.list_held()))
            case AbortAll():
                tell(HostHolds(host, ranks.list_held()))
            case Orders() as given:
                epoch = now = given.go.epoch

                def on_trouble(trouble: RankFailure, now: int = now) -> None:
                    tell(HostFailed(host, now, cause_of(trouble, name)))

                if ranks.run(given, orders, on_trouble):
                    tell(RanksDone(host, epoch))
            case LeadLost(why):
                say(f"{why}; its ranks here are ended, and it is asked for again ...")
            case RunOver() as over:
                return over


def cause_of(trouble: RankFailure, host: str) -> Cause:
    """A rank's trouble as a message for other hosts."""
    error = trouble.error
    has_host = isinstance(error, Fault) and error.host
    text = str(error) if has_host or isinstance(error, UserError) else f"host {host}, {error}"
    is_mistake = isinstance(error, UserError)
    saved_in = error.saved_in if isinstance(error, Fault) else ""
    return Cause(
        text, is_lost=isinstance(error, RankLost), is_mistake=is_mistake, order=trouble.order, saved_in=saved_in
    )


def make_error(cause: Cause) -> Fault | UserError:
    """The error that a launcher raises for a run's end."""
    if cause.is_mistake:
        return UserError(cause.text)
    fault = Fault(cause.text)
    fault.saved_in = cause.saved_in
    return fault

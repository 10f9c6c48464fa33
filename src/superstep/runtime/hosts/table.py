"""table: what the lead of several hosts knows of them, and decides; values, and one function from event to event.

             all hosts have told what they hold            first trouble, or a host is gone
    GATHERS ────────────────────────────────────► RUNS ────────────────────────────────────► ENDS
       ▲       Fetch, as long as one lacks it       │   Abort to all: each ends its ranks     │
       │       Go(epoch + 1, from which state)      │ all are done                            │ all that are here
       │                                            ▼                                         │ have told again
       │                                          OVER ◄─── nothing that a restart mends ─────┤
       └─────────────────────────────────────────────────── ranks were lost, or a host ───────┘

Nothing here waits, sends, or reads a clock: the time comes along with each event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from superstep.state.snapshot import State

MOST_TRIES = 3
"""How often a run is recovered after one and the same state, where ranks are lost."""

ECHO_S = 4.0
"""Where all that is known are broken connections, how long the silence of a host may still come to be the cause."""

ECHO = 3
"""The order of a trouble that came over a connection (``runtime.trouble``)."""


class Phase(Enum):
    """What the hosts are about."""

    GATHERS = "gathers"
    RUNS = "runs"
    ENDS = "ends"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Held:
    """States that are whole in a host's memory.

    Attributes:
        own: of its own ranks.
        copies: of the ranks of the host before it, the last host's for host 0.
    """

    own: frozenset[State] = frozenset()
    copies: frozenset[State] = frozenset()


@dataclass(frozen=True, slots=True)
class Cause:
    """Why ranks are ended.

    Attributes:
        text: in words, with rank and host.
        is_lost: whether a rank or a host was lost, which a restart mends.
        is_mistake: whether it is the user's.
        order: the first cause of several comes first in it, as ``runtime.trouble`` has it.
        at_s: when it was seen, in seconds of the lead's clock.
    """

    text: str
    is_lost: bool = False
    is_mistake: bool = False
    order: int = 1
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seat:
    """A host that is here; ``held`` is None until it has told."""

    held: Held | None = None
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """All of them.

    Attributes:
        seats: by the host's number; None of one that is not here.
        can_recover: whether states are copied, so that a run can go on after a loss.
        patience_s: how long a host that is not here is waited for.
        epoch: how often ranks were started.
        causes: why they are ended, while they are; the first decides.
        lost: what was lost last, while or after it is recovered from.
        since_s: when the phase began.
        tries: how often ranks were lost since the run started from ``state``.
    """

    seats: tuple[Seat | None, ...]
    can_recover: bool
    patience_s: float
    epoch: int = 0
    phase: Phase = Phase.GATHERS
    causes: tuple[Cause, ...] = ()
    lost: Cause | None = None
    since_s: float = 0.0
    state: State | None = None
    tries: int = 0

    @property
    def missing(self) -> tuple[int, ...]:
        """The hosts that are not here."""
        return tuple(host for host, seat in enumerate(self.seats) if seat is None)


@dataclass(frozen=True, slots=True)
class Came:
    """A host is here, for the first time or again; it has seen an epoch."""

    host: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    """A host is gone."""

    host: int
    why: str


@dataclass(frozen=True, slots=True)
class Holds:
    """A host has no ranks, and holds this."""

    host: int
    held: Held


@dataclass(frozen=True, slots=True)
class Troubled:
    """Ranks of a host are ended, for this."""

    host: int
    epoch: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Done:
    """All ranks of a host have come to their end."""

    host: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Came | Left | Holds | Troubled | Done | Tick


@dataclass(frozen=True, slots=True)
class Fetch:
    """A host shall have a state of its ranks back from the host that has the copy."""

    host: int
    source: int
    state: State


@dataclass(frozen=True, slots=True)
class Go:
    """All hosts start their ranks: from this state; None means from the newest checkpoint, or from the start."""

    epoch: int
    state: State | None
    lost: Cause | None


@dataclass(frozen=True, slots=True)
class Abort:
    """All hosts end their ranks."""

    epoch: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Over:
    """The run has ended, by itself where there is no cause."""

    cause: Cause | None = None


Order = Fetch | Go | Abort | Over


@dataclass(frozen=True, slots=True)
class Next:
    """The table after an event, and what is to be done."""

    table: Table
    orders: tuple[Order, ...] = field(default=())


def after(table: Table, event: Event, now_s: float) -> Next:
    """What an event makes of the table."""
    if table.phase is Phase.OVER:
        return Next(table)
    match event:
        case Came(host, epoch):
            # Others are waited for from when host 0 has prepared.
            since_s = now_s if host == 0 else table.since_s
            table = replace(_with(table, host, Seat()), epoch=max(table.epoch, epoch), since_s=since_s)
        case Left(host, why):
            return _left(table, Cause(why, is_lost=True, at_s=now_s), host, now_s)
        case Holds(host, held):
            seat = table.seats[host]
            if seat is not None and table.phase is not Phase.RUNS:
                table = _with(table, host, replace(seat, held=held))
        case Troubled(_, epoch, cause) if epoch == table.epoch:
            return _trouble(table, replace(cause, at_s=now_s), now_s)
        case Done(host, epoch) if epoch == table.epoch and table.phase is Phase.RUNS:
            table = _with(table, host, Seat(is_done=True))
        case _:
            pass
    return _forward(table, now_s)


def _with(table: Table, host: int, seat: Seat | None) -> Table:
    seats = (*table.seats[:host], seat, *table.seats[host + 1 :])
    return replace(table, seats=seats)


def _left(table: Table, cause: Cause, host: int, now_s: float) -> Next:
    if table.seats[host] is None:
        return Next(table)
    table = _with(table, host, None)
    if table.phase is Phase.GATHERS:
        return _forward(replace(table, lost=table.lost or cause) if table.epoch else table, now_s)
    return _trouble(table, cause, now_s)


def _trouble(table: Table, cause: Cause, now_s: float) -> Next:
    """Note it; the first of an epoch has all ranks ended."""
    if table.phase is Phase.ENDS:
        return _forward(replace(table, causes=(*table.causes, cause)), now_s)
    if table.phase is not Phase.RUNS:
        return Next(table)
    seats = tuple(None if seat is None else Seat() for seat in table.seats)
    ending = replace(table, seats=seats, phase=Phase.ENDS, causes=(cause,), since_s=now_s)
    return Next(ending, (Abort(table.epoch, cause),))


def _forward(table: Table, now_s: float) -> Next:
    """Go on to the next phase, where it is time."""
    match table.phase:
        case Phase.RUNS if all(seat is not None and seat.is_done for seat in table.seats):
            return Next(replace(table, phase=Phase.OVER), (Over(),))
        case Phase.ENDS if all(seat is None or seat.held is not None for seat in table.seats):
            return _concluded(table, now_s)
        case Phase.GATHERS:
            return _gathered(table, now_s)
        case _:
            return Next(table)


def _concluded(table: Table, now_s: float) -> Next:
    """All ranks are ended: whether the run goes on."""
    cause = first(table.causes)
    if cause.order >= ECHO and now_s - table.since_s < ECHO_S:
        return Next(table)
    if not cause.is_lost or not table.can_recover:
        return Next(replace(table, phase=Phase.OVER), (Over(cause),))
    return _forward(replace(table, phase=Phase.GATHERS, causes=(), lost=cause, since_s=now_s), now_s)


def first(causes: Sequence[Cause]) -> Cause:
    """The one that the others follow from."""
    return min(causes, key=lambda cause: (cause.order, cause.at_s))


def _gathered(table: Table, now_s: float) -> Next:
    if table.missing and table.seats[0] is not None and now_s - table.since_s >= table.patience_s:
        return Next(replace(table, phase=Phase.OVER), (Over(_too_late(table)),))
    told = [seat.held for seat in table.seats if seat is not None and seat.held is not None]
    if len(told) < len(table.seats):
        return Next(table)
    state = newest(told)
    if state is not None:
        for host, held in enumerate(told):
            if state not in held.own:
                seated = _with(table, host, Seat())
                return Next(seated, (Fetch(host, (host + 1) % len(told), state),))
    tries = table.tries + 1 if table.epoch and table.state == state and table.lost is not None else 1
    if tries > MOST_TRIES:
        return Next(replace(table, phase=Phase.OVER), (Over(table.lost),))
    again = Cause("host 0: its launcher was started again", is_lost=True, at_s=now_s)
    lost = table.lost if state is None else table.lost or again
    go = Go(table.epoch + 1, state, lost)
    seats = tuple(Seat() for _ in told)
    gone = replace(table, seats=seats, epoch=go.epoch, phase=Phase.RUNS, state=state, tries=tries, lost=None)
    return Next(replace(gone, since_s=now_s), (go,))


def newest(held: Sequence[Held]) -> State | None:
    """The newest state that can be had of all hosts: from the memory of each, or from the next one's copy."""
    can = (mine.own | held[(host + 1) % len(held)].copies for host, mine in enumerate(held))
    return max(frozenset.intersection(*can), default=None)


def _too_late(table: Table) -> Cause:
    missing = ", ".join(map(str, table.missing))
    why = f"; it was lost: {table.lost.text}" if table.lost is not None else ""
    return Cause(f"host {missing} has not come within {table.patience_s:g} s{why}")

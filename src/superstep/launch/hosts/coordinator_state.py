"""What the coordinator of several hosts knows of them, and decides; values, and one function from event to event.

             all hosts have told what they hold            first trouble, or a host is gone
    GATHERS ────────────────────────────────────► RUNS ────────────────────────────────────► ENDS
       ▲       Fetch, as long as one lacks it       │   Abort to all: each ends its ranks     │
       │       Go(epoch + 1, from which state)      │ all are done                            │ all that are here
       │                                            ▼                                         │ have told again
       │                                          OVER ◄─── nothing that a restart mends ─────┤
       └─────────────────────────────────────────────────── ranks were lost, or a host ───────┘

A run that is elastic has plans for fewer hosts. Where one is lost and does not come back at once, those that are left
write the newest state down, in an epoch of its own, and go on from there with such a plan; and with a larger one, in
the same way, once there are hosts for it.

Nothing here waits, sends, or reads a clock: the time comes along with each event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from superstep.launch.hosts.events import (
    AbortAll,
    Came,
    Cause,
    Event,
    FetchState,
    Go,
    Holds,
    HostLeft,
    Order,
    Over,
    RanksDone,
    Tick,
    Troubled,
)
from superstep.launch.hosts.membership import ALL, CopyPlacement, HeldStates, largest, neighbour, newest, sources
from superstep.launch.retry import next_try
from superstep.state.snapshots.memory_snapshot import State

ECHO_S = 4.0
"""Where all that is known are broken connections, how long the silence of a host may still come to be the cause."""

ECHO = 3
"""The order of a trouble that came over a connection (``launch.failure``)."""


class Phase(Enum):
    """What the hosts are about."""

    GATHERS = "gathers"
    RUNS = "runs"
    ENDS = "ends"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class HostSlot:
    """A host that is here; ``held`` is None until it has told."""

    held: HeldStates | None = None
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """All of them.

    Attributes:
        seats: by the host's number; None of one that is not here.
        can_recover: whether states are copied, so that a run can go on after a loss.
        patience_s: how long a host that is not here is waited for.
        sizes: for how many hosts there are plans; empty where for all of them alone.
        without_s: how long one that was lost is waited for where there are others.
        epoch: how often ranks were started.
        causes: why they are ended, while they are; the first decides.
        lost: what was lost last, while or after it is recovered from.
        since_s: when the phase began.
        state: that ranks started from.
        tries: how often ranks were lost since the run started from ``state``.
        cut: of the states in memory.
        crew: the hosts that have ranks, or had them last.
        is_saving: whether these write a state down, and do not train.
        saved: that they have, since training ended.
        newest: step that host 0 had in memory when a host had come for which there is a larger plan.
    """

    seats: tuple[HostSlot | None, ...]
    can_recover: bool
    patience_s: float
    sizes: tuple[int, ...] = ()
    without_s: float = 0.0
    epoch: int = 0
    phase: Phase = Phase.GATHERS
    causes: tuple[Cause, ...] = ()
    lost: Cause | None = None
    since_s: float = 0.0
    state: State | None = None
    tries: int = 0
    cut: CopyPlacement = ALL
    crew: tuple[int, ...] = ()
    is_saving: bool = False
    saved: State | None = None
    newest: int | None = None

    @property
    def here(self) -> tuple[int, ...]:
        """The hosts that are here."""
        return tuple(host for host, seat in enumerate(self.seats) if seat is not None)

    @property
    def missing(self) -> tuple[int, ...]:
        """The hosts that are not here."""
        return tuple(host for host, seat in enumerate(self.seats) if seat is None)


@dataclass(frozen=True, slots=True)
class Next:
    """The table after an event, and what is to be done."""

    table: CoordinatorState
    orders: tuple[Order, ...] = field(default=())


def after(table: CoordinatorState, event: Event, now_s: float) -> Next:
    """What an event makes of the table."""
    if table.phase is Phase.OVER:
        return Next(table)
    match event:
        case Came(host, epoch):
            # Others are waited for from when host 0 has prepared.
            since_s = now_s if host == 0 else table.since_s
            table = replace(_with(table, host, HostSlot()), epoch=max(table.epoch, epoch), since_s=since_s)
        case HostLeft(host, why):
            return _after_loss(table, Cause(why, is_lost=True, at_s=now_s), host, now_s)
        case Holds(host, held):
            seat = table.seats[host]
            if seat is not None and not _works(table, host):
                table = _with(table, host, replace(seat, held=held))
                table = replace(table, cut=max(table.cut, held.cut, key=lambda cut: cut.epoch))
        case Troubled(_, epoch, cause) if epoch == table.epoch:
            return _trouble(table, replace(cause, at_s=now_s), now_s)
        case RanksDone(host, epoch) if epoch == table.epoch and _works(table, host):
            seat = table.seats[host] or HostSlot()
            table = _with(table, host, replace(seat, is_done=True))
        case Tick(step) if table.phase is Phase.RUNS:
            return _grow(table, step, now_s)
        case _:
            pass
    return _forward(table, now_s)


def _works(table: CoordinatorState, host: int) -> bool:
    """Whether it has ranks."""
    return table.phase is Phase.RUNS and host in table.crew


def _with(table: CoordinatorState, host: int, seat: HostSlot | None) -> CoordinatorState:
    seats = (*table.seats[:host], seat, *table.seats[host + 1 :])
    return replace(table, seats=seats)


def _after_loss(table: CoordinatorState, cause: Cause, host: int, now_s: float) -> Next:
    if table.seats[host] is None:
        return Next(table)
    had_ranks = _works(table, host) or table.phase is Phase.ENDS
    table = _with(table, host, None)
    if table.phase is Phase.GATHERS:
        return _forward(replace(table, lost=table.lost or cause) if table.epoch else table, now_s)
    return _trouble(table, cause, now_s) if had_ranks else Next(table)


def _trouble(table: CoordinatorState, cause: Cause, now_s: float) -> Next:
    """Note it; the first of an epoch has all ranks ended."""
    if table.phase is Phase.ENDS:
        return _forward(replace(table, causes=(*table.causes, cause)), now_s)
    if table.phase is not Phase.RUNS:
        return Next(table)
    seats = tuple(None if seat is None else HostSlot() for seat in table.seats)
    ending = replace(table, seats=seats, phase=Phase.ENDS, causes=(cause,), since_s=now_s)
    return Next(ending, (AbortAll(table.epoch, cause),))


def _grow(table: CoordinatorState, step: int, now_s: float) -> Next:
    """End the ranks where there are hosts for a larger plan, once another state is whole: few steps are done twice."""
    hosts = [host for host in table.here if host in table.crew or _held_states(table, host) is not None]
    crew = largest(hosts, table.sizes, table.crew)
    if table.is_saving or len(crew) <= len(table.crew):
        return Next(replace(table, newest=None))
    if table.newest is None:
        return Next(replace(table, newest=step))
    if step <= table.newest:
        return Next(table)
    came = " and ".join(str(host) for host in crew if host not in table.crew)
    return _trouble(table, Cause(f"host {came}", is_lost=True, is_gain=True, at_s=now_s), now_s)


def _held_states(table: CoordinatorState, host: int) -> HeldStates | None:
    seat = table.seats[host]
    return None if seat is None else seat.held


def _forward(table: CoordinatorState, now_s: float) -> Next:
    """Go on to the next phase, where it is time."""
    match table.phase:
        case Phase.RUNS if all((seat := table.seats[host]) is not None and seat.is_done for host in table.crew):
            if table.is_saving:
                return _gather_states(replace(table, phase=Phase.GATHERS, is_saving=False, saved=table.state), now_s)
            return Next(replace(table, phase=Phase.OVER), (Over(),))
        case Phase.ENDS if all(seat is None or seat.held is not None for seat in table.seats):
            return _conclude(table, now_s)
        case Phase.GATHERS:
            return _gather_states(table, now_s)
        case _:
            return Next(table)


def _conclude(table: CoordinatorState, now_s: float) -> Next:
    """All ranks are ended: whether the run goes on."""
    cause = first(table.causes)
    if cause.order >= ECHO and now_s - table.since_s < ECHO_S:
        return Next(table)
    if not cause.is_lost or not table.can_recover:
        return Next(replace(table, phase=Phase.OVER), (Over(cause),))
    gathers = replace(table, phase=Phase.GATHERS, causes=(), lost=cause, since_s=now_s, is_saving=False, saved=None)
    return _forward(gathers, now_s)


def first(causes: Sequence[Cause]) -> Cause:
    """The one that the others follow from."""
    return min(causes, key=lambda cause: (cause.order, cause.at_s))


def _gather_states(table: CoordinatorState, now_s: float) -> Next:
    crew = _crew(table, now_s)
    if not crew:
        if table.seats[0] is not None and now_s - table.since_s >= table.patience_s:
            return Next(replace(table, phase=Phase.OVER), (Over(_too_late(table)),))
        return Next(table)
    states = {host: _held_states(table, host) for host in table.here}
    known = {host: held for host, held in states.items() if held is not None}
    if len(known) < len(states):
        return Next(table)
    held = {host: each for host, each in known.items() if each.cut == table.cut}
    parts = table.cut.crew(len(table.seats))
    state = newest(held, parts)
    if crew == parts:
        for host in crew if state is not None else ():
            if host not in held or state not in held[host].own:
                assert state is not None
                return Next(
                    _with(table, host, HostSlot()), (FetchState(host, neighbour(host, parts), state, table.cut),)
                )
        return _start_ranks(table, Go(table.epoch + 1, state, table.lost, table.cut), state, now_s)
    if state is not None and state != table.saved:
        go = Go(table.epoch + 1, state, table.lost, table.cut, sources(held, parts, state))
        return _start_ranks(table, go, state, now_s)
    go = Go(table.epoch + 1, None, table.lost, CopyPlacement(table.epoch + 1, crew))
    return _start_ranks(table, go, state, now_s)


def _crew(table: CoordinatorState, now_s: float) -> tuple[int, ...]:
    """The hosts that shall train now; none while one is waited for."""
    if not table.missing:
        return tuple(range(len(table.seats)))
    before = table.cut.crew(len(table.seats))
    wait_s = table.without_s if table.epoch else table.patience_s
    is_waited_for = not table.epoch or any(host in table.missing for host in before)
    if table.seats[0] is None or (is_waited_for and now_s - table.since_s < wait_s):
        return ()
    return largest(table.here, table.sizes, before)


def _start_ranks(table: CoordinatorState, go: Go, state: State | None, now_s: float) -> Next:
    """Ranks start, where that is not in vain; ``state`` is what they go on from, in memory or written down."""
    is_same = table.state == state and (go.cut == table.cut or bool(go.sources))
    tries = next_try(table.tries, is_same_state=bool(table.epoch) and is_same and table.lost is not None)
    if tries is None:
        return Next(replace(table, phase=Phase.OVER), (Over(table.lost),))
    if go.state is not None and go.lost is None:
        go = replace(go, lost=Cause("host 0: its launcher was started again", is_lost=True, at_s=now_s))
    begun = replace(
        table,
        epoch=go.epoch,
        phase=Phase.RUNS,
        state=state,
        tries=tries,
        cut=go.cut,
        crew=go.crew(len(table.seats)),
        newest=None,
    )
    if go.sources:  # what they hold they hold still
        return Next(replace(begun, is_saving=True, lost=go.lost), (go,))
    seats = tuple(None if seat is None else HostSlot() for seat in table.seats)
    idle = tuple(table.seats[h] if h not in begun.crew else seat for h, seat in enumerate(seats))
    return Next(replace(begun, seats=idle, lost=None, saved=None, since_s=now_s), (go,))


def _too_late(table: CoordinatorState) -> Cause:
    missing = ", ".join(map(str, table.missing))
    why = f"; it was lost: {table.lost.text}" if table.lost is not None else ""
    return Cause(f"host {missing} has not come within {table.patience_s:g} s{why}")

"""The coordinator's state: values, and one function from an event to the next state. It does not wait, send or read a
clock: each event carries its time.

             all hosts have reported their states          first trouble, or a host is lost
    GATHERS ────────────────────────────────────► RUNS ────────────────────────────────────► ENDS
       ▲       Fetch, while a host lacks its state    │   Abort to all: each ends its ranks     │
       │       Go(epoch + 1, from which state)        │ all are done                            │ all present hosts
       │                                              ▼                                         │ have reported again
       │                                            OVER ◄─── a restart does not help ──────────┤
       └─────────────────────────────────────────────────── ranks were lost, or a host ─────────┘

An elastic run has plans for fewer hosts. Where a lost host does not come back soon, the others save the newest state in
an epoch of its own and continue with a smaller plan; once there are enough hosts, they return to a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from superstep.launch.hosts.events import (
    AbortAll,
    Cause,
    Event,
    FetchState,
    HostFailed,
    HostHolds,
    HostJoined,
    HostLeft,
    Order,
    RanksDone,
    RunOver,
    StartRanks,
    Tick,
)
from superstep.launch.hosts.membership import ALL, CopyPlacement, HeldStates, largest, neighbour, newest, sources
from superstep.launch.retry import next_try
from superstep.state.snapshots.memory_snapshot import State

ECHO_S = 4.0
"""Where only broken connections are known, seconds in which a silent host may still prove to be the cause."""

ECHO = 3
"""The order of an error of a connection (``launch.failure``)."""


class Phase(Enum):
    GATHERS = "gathers"
    RUNS = "runs"
    ENDS = "ends"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class HostSlot:
    """A present host; ``held`` is None until it has reported its states."""

    held: HeldStates | None = None
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """All hosts.

    Attributes:
        seats: by host number; None for an absent host.
        can_recover: whether states are copied, so that a run survives a loss.
        patience_s: how long the run waits for an absent host.
        sizes: numbers of hosts that have plans; empty where only all hosts do.
        without_s: how long the run waits for a lost host where there are smaller plans.
        epoch: how often ranks were started.
        causes: why ranks are being ended; the first decides.
        lost: the latest loss, during and after its recovery.
        since_s: when the phase began.
        state: from which ranks started.
        tries: losses since the run started from ``state``.
        cut: of the states in memory.
        crew: the hosts that have ranks, or had them last.
        is_saving: whether these ranks save a state instead of training.
        saved: whether they have, since training ended.
        newest: host 0's newest step when enough hosts for a larger plan had come.
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
        return tuple(host for host, seat in enumerate(self.seats) if seat is not None)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(host for host, seat in enumerate(self.seats) if seat is None)


@dataclass(frozen=True, slots=True)
class NextState:
    """The state after an event, and the orders."""

    table: CoordinatorState
    orders: tuple[Order, ...] = field(default=())


def after(table: CoordinatorState, event: Event, now_s: float) -> NextState:
    if table.phase is Phase.OVER:
        return NextState(table)
    match event:
        case HostJoined(host, epoch):
            # Others are waited for from when host 0 has prepared.
            since_s = now_s if host == 0 else table.since_s
            table = replace(_with(table, host, HostSlot()), epoch=max(table.epoch, epoch), since_s=since_s)
        case HostLeft(host, why):
            return _after_loss(table, Cause(why, is_lost=True, at_s=now_s), host, now_s)
        case HostHolds(host, held):
            seat = table.seats[host]
            if seat is not None and not _works(table, host):
                table = _with(table, host, replace(seat, held=held))
                table = replace(table, cut=max(table.cut, held.cut, key=lambda cut: cut.epoch))
        case HostFailed(_, epoch, cause) if epoch == table.epoch:
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
    """Whether a host has ranks."""
    return table.phase is Phase.RUNS and host in table.crew


def _with(table: CoordinatorState, host: int, seat: HostSlot | None) -> CoordinatorState:
    seats = (*table.seats[:host], seat, *table.seats[host + 1 :])
    return replace(table, seats=seats)


def _after_loss(table: CoordinatorState, cause: Cause, host: int, now_s: float) -> NextState:
    if table.seats[host] is None:
        return NextState(table)
    had_ranks = _works(table, host) or table.phase is Phase.ENDS
    table = _with(table, host, None)
    if table.phase is Phase.GATHERS:
        return _forward(replace(table, lost=table.lost or cause) if table.epoch else table, now_s)
    return _trouble(table, cause, now_s) if had_ranks else NextState(table)


def _trouble(table: CoordinatorState, cause: Cause, now_s: float) -> NextState:
    """Note a cause; the first of an epoch ends all ranks."""
    if table.phase is Phase.ENDS:
        return _forward(replace(table, causes=(*table.causes, cause)), now_s)
    if table.phase is not Phase.RUNS:
        return NextState(table)
    seats = tuple(None if seat is None else HostSlot() for seat in table.seats)
    ending = replace(table, seats=seats, phase=Phase.ENDS, causes=(cause,), since_s=now_s)
    return NextState(ending, (AbortAll(table.epoch, cause),))


def _grow(table: CoordinatorState, step: int, now_s: float) -> NextState:
    """End the ranks where a larger plan is possible, once a new state is complete, so that few steps are repeated."""
    hosts = [host for host in table.here if host in table.crew or _list_held_states(table, host) is not None]
    crew = largest(hosts, table.sizes, table.crew)
    if table.is_saving or len(crew) <= len(table.crew):
        return NextState(replace(table, newest=None))
    if table.newest is None:
        return NextState(replace(table, newest=step))
    if step <= table.newest:
        return NextState(table)
    came = " and ".join(str(host) for host in crew if host not in table.crew)
    return _trouble(table, Cause(f"host {came}", is_lost=True, is_gain=True, at_s=now_s), now_s)


def _list_held_states(table: CoordinatorState, host: int) -> HeldStates | None:
    seat = table.seats[host]
    return None if seat is None else seat.held


def _forward(table: CoordinatorState, now_s: float) -> NextState:
    """Go to the next phase if it is time."""
    match table.phase:
        case Phase.RUNS if all((seat := table.seats[host]) is not None and seat.is_done for host in table.crew):
            if table.is_saving:
                return _gather_states(replace(table, phase=Phase.GATHERS, is_saving=False, saved=table.state), now_s)
            return NextState(replace(table, phase=Phase.OVER), (RunOver(),))
        case Phase.ENDS if all(seat is None or seat.held is not None for seat in table.seats):
            return _conclude(table, now_s)
        case Phase.GATHERS:
            return _gather_states(table, now_s)
        case _:
            return NextState(table)


def _conclude(table: CoordinatorState, now_s: float) -> NextState:
    """All ranks have ended: decide whether the run continues."""
    cause = first(table.causes)
    if cause.order >= ECHO and now_s - table.since_s < ECHO_S:
        return NextState(table)
    if not cause.is_lost or not table.can_recover:
        return NextState(replace(table, phase=Phase.OVER), (RunOver(cause),))
    gathers = replace(table, phase=Phase.GATHERS, causes=(), lost=cause, since_s=now_s, is_saving=False, saved=None)
    return _forward(gathers, now_s)


def first(causes: Sequence[Cause]) -> Cause:
    """The cause that the others follow from."""
    return min(causes, key=lambda cause: (cause.order, cause.at_s))


def _gather_states(table: CoordinatorState, now_s: float) -> NextState:
    crew = _crew(table, now_s)
    if not crew:
        if table.seats[0] is not None and now_s - table.since_s >= table.patience_s:
            return NextState(replace(table, phase=Phase.OVER), (RunOver(_too_late(table)),))
        return NextState(table)
    states = {host: _list_held_states(table, host) for host in table.here}
    known = {host: held for host, held in states.items() if held is not None}
    if len(known) < len(states):
        return NextState(table)
    held = {host: each for host, each in known.items() if each.cut == table.cut}
    parts = table.cut.crew(len(table.seats))
    state = newest(held, parts)
    if crew == parts:
        for host in crew if state is not None else ():
            if host not in held or state not in held[host].own:
                assert state is not None
                return NextState(
                    _with(table, host, HostSlot()), (FetchState(host, neighbour(host, parts), state, table.cut),)
                )
        return _start_ranks(table, StartRanks(table.epoch + 1, state, table.lost, table.cut), state, now_s)
    if state is not None and state != table.saved:
        go = StartRanks(table.epoch + 1, state, table.lost, table.cut, sources(held, parts, state))
        return _start_ranks(table, go, state, now_s)
    go = StartRanks(table.epoch + 1, None, table.lost, CopyPlacement(table.epoch + 1, crew))
    return _start_ranks(table, go, state, now_s)


def _crew(table: CoordinatorState, now_s: float) -> tuple[int, ...]:
    """The hosts that train next; none while the run waits for a host."""
    if not table.missing:
        return tuple(range(len(table.seats)))
    before = table.cut.crew(len(table.seats))
    wait_s = table.without_s if table.epoch else table.patience_s
    is_waited_for = not table.epoch or any(host in table.missing for host in before)
    if table.seats[0] is None or (is_waited_for and now_s - table.since_s < wait_s):
        return ()
    return largest(table.here, table.sizes, before)


def _start_ranks(table: CoordinatorState, go: StartRanks, state: State | None, now_s: float) -> NextState:
    """Start ranks unless it is useless; ``state`` is what they continue from, in memory or saved."""
    is_same = table.state == state and (go.cut == table.cut or bool(go.sources))
    tries = next_try(table.tries, is_same_state=bool(table.epoch) and is_same and table.lost is not None)
    if tries is None:
        return NextState(replace(table, phase=Phase.OVER), (RunOver(table.lost),))
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
        return NextState(replace(begun, is_saving=True, lost=go.lost), (go,))
    seats = tuple(None if seat is None else HostSlot() for seat in table.seats)
    idle = tuple(table.seats[h] if h not in begun.crew else seat for h, seat in enumerate(seats))
    return NextState(replace(begun, seats=idle, lost=None, saved=None, since_s=now_s), (go,))


def _too_late(table: CoordinatorState) -> Cause:
    missing = ", ".join(map(str, table.missing))
    why = f"; it was lost: {table.lost.text}" if table.lost is not None else ""
    return Cause(f"host {missing} has not come within {table.patience_s:g} s{why}")

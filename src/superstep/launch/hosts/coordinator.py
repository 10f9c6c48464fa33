"""The coordinator: host 0's launcher, which decides for all hosts (``launch.hosts.coordinator_state``).

    channels of members ──► events ──► one thread: after(table, event) ──► orders ──► channels of members
    host 0's own ranks ─────┘                                             └──────────► host 0's own queue

It sends a heartbeat to each member four times a second; a member that is silent for SILENT_S is lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from typing import Protocol

from superstep.errors import SuperstepError, UserError
from superstep.launch.hosts.coordinator_state import CoordinatorState, Phase, after
from superstep.launch.hosts.copy_schedule import CopySteps, HostProgress, ScheduleKeeper
from superstep.launch.hosts.events import Cause, Event, FetchState, HostLeft, RunOver, StartRanks, Tick
from superstep.launch.hosts.events import Order as Decision
from superstep.launch.hosts.listener import SecureListener
from superstep.launch.hosts.membership import neighbour
from superstep.launch.hosts.messages import (
    BEAT_S,
    FROM_MEMBER,
    HELLO,
    Address,
    Fetching,
    Hello,
    LeadBeat,
    LeadReached,
    MemberBeat,
    NotNow,
    Orders,
    Refused,
    SentOrder,
    Silence,
    Welcome,
)
from superstep.launch.hosts.secure_channel import ForeignMessage, SecureChannel

LEAVING_S = 2.0
"""Seconds for members to receive that the run is over."""

POLL_S = 0.01


class HostCopies(Protocol):
    """A host's copies of states: their progress, what to copy next, and transfers with other hosts."""

    def progress(self) -> HostProgress | None:
        """How far this host's states are copied; None without ranks."""

    def steer(self, steps: CopySteps) -> None:
        """Follow the coordinator's choice of what to copy next."""

    def enters(self, wire: SecureChannel, hello: Hello) -> None:
        """Serve another host that brings or fetches copies."""


@dataclass(slots=True)
class _Member:
    wire: SecureChannel
    there: str
    hello: Hello
    silence: Silence
    progress: HostProgress | None


class Coordinator:
    """Coordinates until it is closed; sends this host's own orders to ``orders``.

    Args:
        at: where it listens.
        mine: this host's own hello; members must match it.
        prepare: makes the store of an epoch, and returns the encoded facts of the run.
        copies: host 0's copies, and the schedule of all copies.
        tell: called with a line for the user.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        at: Address,
        secret: bytes,
        *,
        mine: Hello,
        table: CoordinatorState,
        prepare: Callable[[StartRanks], tuple[Address, bytes]],
        copies: tuple[HostCopies, ScheduleKeeper],
        tell: Callable[[str], None],
    ) -> None:
        self._mine, self._table, self._prepare, self._tell = mine, table, prepare, tell
        self._own, self._steering = copies
        self._members: dict[int, _Member] = {}
        self._events: queue.Queue[Event] = queue.Queue()
        self._one = threading.Lock()
        self._is_closed = threading.Event()
        self.orders, self._orders = Pipe(duplex=False)
        self._door = SecureListener(at, secret, HELLO, self._enters, tell)
        self.address = self._door.address
        self._thread = threading.Thread(target=self._run, name="superstep-lead", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Host 0 is prepared and joins."""
        self._orders.send(LeadReached())

    def handle_event(self, event: Event) -> None:
        """Receive an event of host 0, or the end of the run."""
        self._events.put(event)

    def close(self, last: RunOver) -> None:
        """Announce the end of the run, and stop listening."""
        self._is_closed.set()
        self._thread.join()
        if self._table.phase is not Phase.OVER:
            self._send(range(1, len(self._table.seats)), last)
        # They leave when they have heard it; to end their connections before might keep it from them.
        deadline_s = time.monotonic() + LEAVING_S
        while self._members and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        self._door.close()

    def _run(self) -> None:
        next_s = time.monotonic()
        while not self._is_closed.is_set():
            with suppress(queue.Empty):
                self._apply(self._events.get(timeout=max(0.0, next_s - time.monotonic())))
                continue
            next_s = time.monotonic() + BEAT_S
            self._apply(Tick(self._beat()))

    def _apply(self, event: Event) -> None:
        after_event = after(self._table, event, time.time())
        before, self._table = self._table, after_event.table
        try:
            for order in after_event.orders:
                self._do(order)
        except (SuperstepError, OSError) as error:  # the run directory cannot be read, say
            self._table = replace(after_event.table, phase=Phase.OVER)
            self._do(RunOver(Cause(f"host 0: {error}", is_mistake=isinstance(error, UserError))))
        if before.phase is not self._table.phase and self._table.phase is Phase.GATHERS and self._table.missing:
            self._tell(_waiting(self._table))

    def _do(self, order: Decision) -> None:
        match order:
            case StartRanks():
                crew = order.crew(len(self._table.seats))
                if order.cut.hosts and order.cut.epoch == order.epoch:
                    who = f"host {crew[0]} trains" if len(crew) == 1 else f"hosts {', '.join(map(str, crew))} train"
                    self._tell(f"From here on {who}.")
                self._steering.begin(0 if order.state is None else order.state[0], () if order.sources else crew)
                store, facts = self._prepare(order)
                for host in crew:
                    has_next = len(crew) > 1 and not order.sources
                    there = self._address(neighbour(host, crew)) if has_next else None
                    self._send([host], Orders(go=order, store=store, facts=facts, next=there))
            case FetchState(host, source, state, cut):
                address = self._address(source)
                if address is not None:
                    self._send([host], Fetching(state, address, cut))
            case _:
                self._send(range(len(self._table.seats)), order)

    def _address(self, host: int) -> Address | None:
        """Where a host listens for copies."""
        if host == 0:
            return self.address
        with self._one:
            member = self._members.get(host)
        return None if member is None else (member.there, member.hello.port)

    def _send(self, hosts: range | list[int], order: SentOrder) -> None:
        for host in hosts:
            if host == 0:
                self._orders.send(order)
                continue
            with self._one:
                member = self._members.get(host)
            if member is not None:
                with suppress(OSError):  # it is gone, as who receives from it says
                    member.wire.say(order)

    def _beat(self) -> int:
        """Send heartbeats, with what to copy next; returns the step whose state is complete in host 0's memory."""
        now_s = time.monotonic()
        with self._one:
            members = dict(self._members)
        own = self._own.progress()
        steps = self._steering.after({0: own} | {h: m.progress for h, m in members.items()})
        if steps is not None:
            self._own.steer(steps)
        for member in members.values():
            if member.silence.look(now_s):
                member.wire.close()
            else:
                with suppress(OSError):
                    member.wire.say(LeadBeat(steps))
        return 0 if own is None else own.newest

    def _enters(self, wire: SecureChannel, hello: Hello) -> None:
        if (why := unlike(hello, self._mine)) is not None:
            wire.say(Refused(why))
        elif hello.purpose != "join":
            self._own.enters(wire, hello)
        elif self._is_seated(wire, hello):
            self._listen(hello.host)

    def _is_seated(self, wire: SecureChannel, hello: Hello) -> bool:
        """Try to give a host its place, and answer it."""
        with self._one:
            before = self._members.get(hello.host)
            if before is None:
                wire.say(Welcome())
                self._members[hello.host] = _Member(wire, wire.there, hello, Silence(time.monotonic()), None)
            elif before.hello.process == hello.process or before.silence.seconds > 4 * BEAT_S:
                before.wire.close()  # it is that one, or takes the place of one that is gone
                wire.say(NotNow("its last connection is just ended"))
            else:
                why = f"host {hello.host} is here already, from {before.there}; give each host its own --host."
                wire.say(Refused(why))
        if before is None:
            self._tell(f"Host {hello.host} of {hello.hosts} is here, from {wire.there}.")
        return before is None

    def _listen(self, host: int) -> None:
        """Pass on a member's events until it is gone."""
        member = self._members[host]
        why = "its connection was ended"
        try:
            while True:
                message = member.wire.hear(FROM_MEMBER)
                member.silence.note_message()
                if isinstance(message, MemberBeat):
                    member.progress = message.progress
                elif message.host != host:
                    raise ForeignMessage(f"its message says that it is host {message.host}")
                else:
                    self._events.put(message)
        except ForeignMessage as error:
            why = str(error)
        except OSError as error:
            is_silent = member.silence.seconds > 4 * BEAT_S
            why = f"it has said nothing for {member.silence.seconds:.1f} s" if is_silent else f"{why} ({error})"
        finally:
            there = member.there
            with self._one:  # who comes next comes after this one has left
                self._events.put(HostLeft(host, f"host {host} ({there}): it is lost, {why}"))
                del self._members[host]


def _waiting(table: CoordinatorState) -> str:
    missing = ", ".join(map(str, table.missing))
    goes_on = table.epoch and table.sizes and table.sizes[0] <= len(table.here)
    patience = f"{table.without_s:g} s, then the run goes on without" if goes_on else f"{table.patience_s:g} s at most"
    return f"Waiting for host {missing}, {patience}: start the same command there again ..."


def unlike(hello: Hello, mine: Hello) -> str | None:
    """Why a launcher does not match the run; None where it does."""
    if hello.version != mine.version:
        return f"host {hello.host} has version {hello.version} of superstep, and host 0 {mine.version}; install one."
    if hello.hosts != mine.hosts:
        return f"--hosts = {hello.hosts} on host {hello.host}, and {mine.hosts} on host 0; give all the same."
    if hello.purpose == "join" and not 0 < hello.host < mine.hosts:
        return f"--host = {hello.host} is not one of 1 to {mine.hosts - 1}, which host 0 waits for."
    if hello.run != mine.run:
        return (
            f"host {hello.host} was started with another configuration than host 0; start all with the same run.toml "
            "and the same flags, but for --host."
        )
    return None

"""Keeper: holds the states of a host's own ranks, sends them to the next host, and holds copies of the previous host's.

    host 0 ── states of its ranks ──► host 1 ── ... ──► host n - 1 ── ... ──► host 0

A host that has lost its memory fetches its states back before its ranks start.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from superstep.launch.hosts.copy_schedule import CopySteps, HostProgress
from superstep.launch.hosts.listener import JoinRefused, knock
from superstep.launch.hosts.membership import ALL, CopyPlacement, HeldStates
from superstep.launch.hosts.messages import BEAT_S, Address, Fetching, Hello, Orders, Welcome
from superstep.launch.hosts.secure_channel import SecureChannel
from superstep.launch.hosts.state_transfer import (
    FETCH,
    HELD,
    FetchCopy,
    HeldCopies,
    RateLimit,
    StateCorrupt,
    StateDropped,
    receive,
    send,
)
from superstep.state.snapshots.background_checkpoint import NICE
from superstep.state.snapshots.damage import void_damaged
from superstep.state.snapshots.memory_snapshot import SnapshotMemory, State, make_memories

LOOK_S = 0.02
"""Seconds between looks for states to send."""


class ReplicaStore:
    """A host's states and copies.

    Args:
        ranks: their number; 0 without snapshots.
        peers: hosts that have copies of them: 0 or 1.
        bytes_per_s: the fastest sending; None for no limit.
        say: called with a line for the user.
    """

    def __init__(
        self, ranks: int, secret: bytes, *, peers: int, bytes_per_s: float | None, say: Callable[[str], None]
    ) -> None:
        self._ranks, self._secret, self._say = ranks, secret, say
        self._has_peer = peers > 0 and ranks > 0
        self._cut = ALL
        self._make()
        self._bytes_per_s = bytes_per_s
        self._one, self._receives = threading.Lock(), threading.Lock()
        self._guest: SecureChannel | None = None
        self._epoch, self._is_begun = 0, False
        self._copied: State = (0, 0)
        self._sender: _Sender | None = None
        self.hello: Hello | None = None
        """This host's hello, once it is known."""

    def list_held(self) -> HeldStates:
        """States that are complete here, with the bits that were copied."""
        with self._one:
            self._void_damaged(self._memories)
            self._void_damaged(self._copies)
            return HeldStates(own=_common(self._memories), copies=_common(self._copies), cut=self._cut)

    def _void_damaged(self, memories: Sequence[SnapshotMemory]) -> None:
        """Discard damaged states, in the own memories or in the copies."""
        if self.hello is None:
            return
        crew = self._cut.crew(self.hello.hosts)
        at = crew.index(self.hello.host) if self.hello.host in crew else 0
        of = at if memories is self._memories else at - 1
        for text in void_damaged(memories, self._ranks * (of % len(crew))):
            self._say(f"host {self.hello.host}, {text}; it is not used.")

    def _make(self) -> None:
        """Make empty memory for own states and for copies."""
        self.own, self._memories = make_memories(self._ranks)
        self.copies, self._copies = make_memories(self._ranks if self._has_peer else 0)

    def _recut(self, cut: CopyPlacement) -> None:
        """Discard all states if the cut changes."""
        if cut == self._cut:
            return
        while not self._receives.acquire(timeout=LOOK_S):
            if (guest := self._guest) is not None:  # who brings parts of another cut
                guest.close()
        with self._one:
            for memory in (*self._memories, *self._copies):
                memory.close()
            self._cut, self._epoch = cut, max(self._epoch, cut.epoch)
            self._make()
        self._receives.release()

    def fetch(self, order: Fetching) -> None:
        """Fetch a state of its own ranks from the host that has the copy."""
        assert self.hello is not None
        self._recut(order.cut)
        with suppress(OSError, JoinRefused):
            wire = knock(order.source, self._secret, msgspec.structs.replace(self.hello, purpose="fetch"))
            try:
                wire.say(FetchCopy(order.state))
                receive(wire, self._memories, lambda state, epoch, mark: mark())
            finally:
                wire.close()
        if order.state not in self.list_held().own:
            time.sleep(BEAT_S)  # the lead asks for it again

    def begin(self, given: Orders) -> None:
        """Ranks start from a state, or none: discard later states."""
        self._recut(given.go.cut)
        step = -1 if given.go.state is None else given.go.state[0]
        with self._one:
            self._epoch, self._copied = given.go.epoch, (0, 0)
            for memory in (*self._memories, *self._copies):
                memory.forget_after(step)
            for memory in self._memories:
                if memory.is_laid_out:
                    memory.request(0)
                for state, slot in memory.states().items():
                    memory.put(slot, "is_held", int(state == given.go.state))
        self._is_begun = True
        if self._has_peer and given.next is not None:
            there, epoch = given.next, given.go.epoch
            self._sender = _Sender(lambda sender: self._send(there, epoch, sender))

    def rest(self) -> None:
        """Ranks have ended."""
        self._is_begun = False
        if self._sender is not None:
            self._sender.stop()
            self._sender = None

    def progress(self) -> HostProgress | None:
        if not self._is_begun:
            return None
        with self._one:
            held, own = _common(self._memories, held=True), _common(self._memories)
        newest, held_step = max(own, default=(0, 0))[0], max(held, default=(0, 0))[0]
        return HostProgress(newest, self._copied[0], held_step)

    def steer(self, steps: CopySteps) -> None:
        """Hold the state to copy next, and the last one that all have copied."""
        if not self._has_peer:
            return
        kept = {steps.copied, steps.next}
        with self._one:
            for memory in self._memories:
                if memory.is_laid_out:
                    memory.hold_only(kept)
                    memory.request(steps.next)
            for memory in self._copies:
                memory.hold_only(kept)

    def enters(self, wire: SecureChannel, hello: Hello) -> None:
        """Serve the previous host: take its copies, or send them back."""
        wire.say(Welcome())
        _gently()
        if hello.purpose == "fetch":
            state = wire.hear(FETCH).state
            try:
                send(wire, self._copies, state, self._epoch, RateLimit(None))
            except StateCorrupt:
                self._void_damaged(self._copies)
            except StateDropped:
                pass
            return
        with self._one:
            before, self._guest = self._guest, wire
        if before is not None:  # one of the same host, which it has lost
            before.close()
        with self._receives:
            wire.say(HeldCopies(_common(self._copies)))
            while True:
                receive(wire, self._copies, self._keep, lambda epoch: epoch >= self._epoch)

    def _keep(self, state: State, epoch: int, mark: Callable[[], None]) -> None:
        with self._one:
            if epoch >= self._epoch:
                mark()

    def _send(self, there: Address, epoch: int, sender: _Sender) -> None:
        """Send the held states to the next host until the ranks have ended."""
        assert self.hello is not None
        wire = sender._open(knock(there, self._secret, msgspec.structs.replace(self.hello, purpose="copy")))
        has = wire.hear(HELD).states
        rate = RateLimit(self._bytes_per_s)
        while not sender.is_over.wait(LOOK_S):
            state = max(_common(self._memories, held=True), default=(0, 0))
            if state <= self._copied:
                continue
            if state not in has:
                try:
                    send(wire, self._memories, state, epoch, rate)
                except StateCorrupt:
                    self._void_damaged(self._memories)
                    continue
                except StateDropped:
                    continue
            self._copied = state


class _Sender:
    """A thread that sends, and starts again after a lost connection."""

    def __init__(self, work: Callable[[_Sender], None]) -> None:
        self.is_over = threading.Event()
        self._work = work
        self._wire: SecureChannel | None = None
        self._thread = threading.Thread(target=self._run, name="superstep-copies", daemon=True)
        self._thread.start()

    def _open(self, wire: SecureChannel) -> SecureChannel:
        """Note a channel to close at the end."""
        self._wire = wire
        if self.is_over.is_set():
            wire.close()
        return wire

    def stop(self) -> None:
        """End it, even in the middle of a state."""
        self.is_over.set()
        if self._wire is not None:
            self._wire.close()
        self._thread.join()

    def _run(self) -> None:
        _gently()
        while not self.is_over.is_set():
            with suppress(OSError, JoinRefused):
                self._work(self)
            if self._wire is not None:
                self._wire.close()
            self.is_over.wait(BEAT_S)


def _gently() -> None:
    """Lower this thread's priority below training."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _common(memories: Sequence[SnapshotMemory], *, held: bool = False) -> frozenset[State]:
    """States that are complete in all memories."""
    kept = [frozenset(memory.states(held=held)) for memory in memories]
    return frozenset.intersection(*kept) if kept else frozenset()

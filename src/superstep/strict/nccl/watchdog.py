"""The watchdog of running calls, as in ProcessGroupNCCL: ends a process with a call that does not end."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import psutil
import torch.distributed as dist

from superstep.strict.nccl.stall import StallDetector, has_ended
from superstep.strict.nccl.transport import GlooTransport
from superstep.strict.nccl.works import PendingCall, StreamWork

POLL_S = 0.2

POLLS_PER_LOOK = 5
"""Polls between two reads of processor times, which come from files of the system."""


@dataclass(frozen=True, slots=True)
class Members:
    """Members of a communicator.

    Attributes:
        transport: between them.
        processes: in the order of the group.
    """

    transport: GlooTransport
    processes: Sequence[psutil.Process]

    def missing(self) -> str:
        """The member that the running call waits for; empty if there is none."""
        for number in list(self.transport.awaited):
            return self.transport.missing(number, "has ended" * has_ended(self.processes[number]))
        return ""


@dataclass(frozen=True, slots=True)
class _Watched:
    call: PendingCall
    work: weakref.ref[StreamWork]

    @property
    def is_needed(self) -> bool:
        """Whether it is running, or a later wait would release its tensors."""
        return not self.call.end.query() or (bool(self.call.tensors) and self.work() is not None)


@dataclass(slots=True, eq=False)
class HostWait:
    """A host that waits for other ranks.

    Attributes:
        why: the missing member and the call, after some time.
    """

    why: str = ""


class Watchdog:
    """Ends the process if a call does not end in time, or no rank makes progress; reports the running calls.

    Of several late calls it names the oldest one. It names none of a communicator that a member has left: there the
    first call that needs the member fails, and the host raises this error.

    Tensors of a call without a wait are released by the next call of its communicator, in the thread of that call
    (``shelvesToUnstash_`` in ProcessGroupNCCL.cpp). Those of an existing work are kept, so that the peak of memory does
    not depend on this thread's timing if each work is waited for.
    """

    def __init__(self, device: ModuleType) -> None:
        self._device = device
        self._watched: list[_Watched] = []
        self._over: list[PendingCall] = []
        self._members: dict[int, Members] = {}
        self._hosts: list[HostWait] = []
        self._stall = StallDetector()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._owner = 0

    def watch(self, work: StreamWork) -> None:
        """Keep a call until it ends, and release ended calls of its communicator."""
        with self._lock:
            self._begin()
            released = [call for call in self._over if call.queue == work.call.queue]
            self._over = [call for call in self._over if call.queue != work.call.queue]
            self._watched.append(_Watched(work.call, weakref.ref(work)))
        self._release(released)

    @contextmanager
    def waiting_host(self) -> Iterator[HostWait]:
        """Within the block this thread waits for other ranks."""
        wait = HostWait()
        with self._lock:
            self._begin()
            self._hosts.append(wait)
        try:
            yield wait
        finally:
            with self._lock:
                self._hosts.remove(wait)

    def _begin(self) -> None:
        """Start the thread of this process. The lock is held."""
        if self._owner != os.getpid():  # a fork has none of its parent's threads
            self._owner, self._watched, self._over, self._hosts = os.getpid(), [], [], []
            self._thread = threading.Thread(target=self._run, name="strict watchdog", daemon=True)
            self._thread.start()

    def add_members(self, queue: int, members: Members) -> None:
        """Set the members of a communicator."""
        with self._lock:
            self._members[queue] = members

    def forget(self, queues: Collection[int]) -> None:
        """Drop the calls of communicators that were aborted or closed."""
        with self._lock:
            released = [call for call in (*self._over, *(w.call for w in self._watched)) if call.queue in queues]
            self._over = [call for call in self._over if call.queue not in queues]
            self._watched = [each for each in self._watched if each.call.queue not in queues]
            self._members = {queue: members for queue, members in self._members.items() if queue not in queues}
        self._release(released)

    def _release(self, calls: list[PendingCall]) -> None:
        for call in calls:
            self._device.mark_over(call.tensors, call.end.event_id)
            call.tensors = []

    def _run(self) -> None:
        looks = itertools.count()
        while True:
            time.sleep(POLL_S)
            under_way = self._device.under_way()  # before the calls that are running: so it has each of these
            with self._lock:
                self._sort()
                pending = [each.call for each in self._watched if not each.call.end.query()]
                hosts = [wait.why for wait in self._hosts if wait.why]
                failed = {queue for queue, members in self._members.items() if members.transport.left}
            late = [call for call in pending if time.monotonic() > call.deadline_s and call.queue not in failed]
            if late:
                self._end(f"{late[0].what} has not ended in its time", under_way)
            if not pending and not hosts:
                self._stall.reset()
            elif next(looks) % POLLS_PER_LOOK == 0 and self._is_stalled():
                self._end(f"no rank moves any more: {hosts[0] if hosts else self._cause(pending)}", under_way)

    def _sort(self) -> None:
        """Move ended calls to those that can be released. The lock is held."""
        watched, self._watched = self._watched, []
        for each in watched:
            if each.is_needed:
                self._watched.append(each)
            elif each.call.tensors:
                self._over.append(each.call)

    def _is_stalled(self) -> bool:
        with self._lock:
            processes = {process for each in self._members.values() for process in each.processes}
        # If some rank is in no communicator of this one, its state is unknown.
        world = dist.group.WORLD
        return world is not None and len(processes) >= world.size() and self._stall.is_stalled(list(processes))

    def _cause(self, pending: Sequence[PendingCall]) -> str:
        """The hanging call, and the member that it waits for, if known."""
        with self._lock:
            members = dict(self._members)
        for call in pending:
            missing = members[call.queue].missing() if call.queue in members else ""
            if missing:
                return f"{call.what} waits for {missing}"
        return f"{pending[0].what} has not ended"

    def _end(self, why: str, under_way: Sequence[str]) -> None:
        races = self._device.take_races()
        race = f"; before it, a race: {races[0]}" if races else ""
        sys.stderr.write(f"strict device: watchdog: {why}; under way: {'; '.join(under_way)}{race}\n")
        sys.stderr.flush()
        os.abort()

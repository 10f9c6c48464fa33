"""The watchdog of calls under way, as ProcessGroupNCCL has one: ends a process whose calls do not end."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType

from superstep.strict.works import PendingCall, StreamWork

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class _Watched:
    call: PendingCall
    work: weakref.ref[StreamWork]

    @property
    def is_needed(self) -> bool:
        """Whether it is under way, or somebody may still wait for it, which then lets go of its tensors."""
        return not self.call.end.query() or (bool(self.call.tensors) and self.work() is not None)


class Watchdog:
    """Ends the process where a call does not end in time, and says what is under way.

    The tensors of a call that nobody waits for are given back by the next call of its communicator, in the thread of
    that call (``shelvesToUnstash_`` in ProcessGroupNCCL.cpp). Those of a work that is still there are kept, so that
    no peak of memory depends on when this thread runs where each work is waited for.
    """

    def __init__(self, device: ModuleType) -> None:
        self._device = device
        self._watched: list[_Watched] = []
        self._over: list[PendingCall] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._owner = 0

    def watch(self, work: StreamWork) -> None:
        """Hold on to a call until it is over, and let go of those of its communicator that are."""
        with self._lock:
            if self._owner != os.getpid():  # a fork has none of its parent's threads
                self._owner, self._watched, self._over = os.getpid(), [], []
                self._thread = threading.Thread(target=self._run, name="strict watchdog", daemon=True)
                self._thread.start()
            released = [call for call in self._over if call.queue == work.call.queue]
            self._over = [call for call in self._over if call.queue != work.call.queue]
            self._watched.append(_Watched(work.call, weakref.ref(work)))
        self._release(released)

    def forget(self, queues: Collection[int]) -> None:
        """Await nothing more of communicators, which have been aborted or have ended."""
        with self._lock:
            released = [call for call in (*self._over, *(w.call for w in self._watched)) if call.queue in queues]
            self._over = [call for call in self._over if call.queue not in queues]
            self._watched = [each for each in self._watched if each.call.queue not in queues]
        self._release(released)

    def _release(self, calls: list[PendingCall]) -> None:
        for call in calls:
            self._device.mark_over(call.tensors, call.end.event_id)
            call.tensors = []

    def _run(self) -> None:
        while True:
            time.sleep(POLL_S)
            with self._lock:
                watched, self._watched = self._watched, []
                for each in watched:
                    if each.is_needed:
                        self._watched.append(each)
                    elif each.call.tensors:
                        self._over.append(each.call)
                del watched
                pending = [each.call for each in self._watched if not each.call.end.query()]
            late = next((call for call in pending if time.monotonic() > call.deadline_s), None)
            if late is not None:
                under_way = "; ".join(self._device.under_way())
                sys.stderr.write(
                    f"strict device: watchdog: {late.what} has not ended in its time; under way: {under_way}\n"
                )
                sys.stderr.flush()
                os.abort()

"""Reading of files that may block forever, such as those of a hung mount: in a thread that can be given up.

    work(progress) ── progress ── progress ── a result      each progress restarts the time limit
                   ── progress ── nothing for timeout_s     given up: waiting callers get an error, the thread is left

A thread in a blocked system call cannot be ended. It is a daemon, so that it keeps no process alive, and its late
result is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Generic, TypeVar

from superstep.errors import StateError

TIMEOUT_S = 60.0
POLL_S = 0.01


T = TypeVar("T")


class BackgroundReader(Generic[T]):
    """Starts to read at once.

    Args:
        path: for the error.
        work: reads, and calls its argument at each progress.
        timeout_s: the longest time without progress.
        drop: releases a result that is not taken.
    """

    def __init__(
        self,
        path: object,
        work: Callable[[Callable[[], None]], T],
        *,
        timeout_s: float = TIMEOUT_S,
        drop: Callable[[T], None] = lambda result: None,
    ) -> None:
        self._path = path
        self._work = work
        self._timeout_s = timeout_s
        self._drop = drop
        self._progress_s = time.monotonic()
        self._lock = Lock()
        self._over = Event()
        self._results: list[T] = []
        self._error: BaseException | None = None
        Thread(target=self._run, name="reader", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended or was given up; gives it up after the time limit."""
        with self._lock:
            if not self._over.is_set() and time.monotonic() - self._progress_s > self._timeout_s:
                self._error = StateError(
                    f"{self._path} was not read: nothing came for {self._timeout_s:g} s; see that its disk or mount "
                    "answers, or name a copy elsewhere."
                )
                self._over.set()
            return self._over.is_set()

    def wait(self, most_s: float) -> bool:
        """Wait at most ``most_s``; whether it is over."""
        self._over.wait(most_s)
        return self.is_over

    def result(self) -> T:
        """Wait for the result.

        Raises:
            StateError: it was given up.
            Exception: the error of ``work``.
        """
        while not self.wait(min(1.0, self._timeout_s)):
            pass
        if self._error is not None:
            raise self._error
        return self._results[0]

    async def answer(self) -> T:
        """``result`` for an event loop."""
        while not self.is_over:
            await asyncio.sleep(POLL_S)
        return self.result()

    def give_up(self) -> None:
        """Drop the result, now or when it comes; it cannot be taken any more."""
        with self._lock:
            results, self._results = self._results, []
            self._over.set()
        for result in results:
            self._drop(result)

    def _progress(self) -> None:
        self._progress_s = time.monotonic()

    def _run(self) -> None:
        results: list[T] = []
        error: BaseException | None = None
        try:
            results.append(self._work(self._progress))
        except BaseException as raised:  # noqa: BLE001 - it is raised where the result is asked for
            error = raised
        with self._lock:
            is_late = self._over.is_set()
            if not is_late:
                self._results, self._error = results, error
                self._over.set()
        if is_late and results:
            self._drop(results[0])

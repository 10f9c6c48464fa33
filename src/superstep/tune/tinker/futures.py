"""Futures: a queue of requests, and their results until clients fetch them.

    handlers ──submit──► queue ──► one thread: trains, saves, and between these steps of the sampler
        ▲                             │
        └──── wait(request) ◄── result┘

Requests run in the order of arrival. A repeated request, as after a broken connection, runs once.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from superstep.errors import SuperstepError, UserError
from superstep.tune.tinker.sampler import PromptSampler

KEPT = 256
"""Fetched results that are kept for repeated requests after a broken connection."""

LEFT_S, MOST_LEFT = 3600.0, 16_384
"""Time and number limits of results that no client fetches: the oldest are dropped."""

MOST_WAITING, MOST_WAITING_BYTES = 16_384, 1 << 30
"""Limits of pending requests of all clients, and of the bytes of their bodies."""

IDLE_S = 5.0


class QueueFull(SuperstepError):
    """There is no room for another request or session now; try again later."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a request.

    Attributes:
        body: for the client.
        is_proto: whether it is protobuf; else JSON.
    """

    body: bytes
    is_proto: bool = False


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The error of a request.

    Attributes:
        message: one line.
        is_users: whether it is the client's mistake.
    """

    message: str
    is_users: bool


Outcome = Result | RequestFailed
Reply = Callable[[Outcome], None]
Job = Callable[[Reply], None]
"""Does the work; replies once, now or in a later step of the sampler."""


def error_of(error: BaseException) -> RequestFailed:
    """An error as the client receives it."""
    if isinstance(error, SuperstepError):
        return RequestFailed(str(error), isinstance(error, UserError))
    return RequestFailed(f"{type(error).__name__}: {error}".partition("\n")[0], is_users=False)


class RequestQueue:
    """Requests and their results.

    Args:
        sampler: driven by the thread.
        tell: receives lines about unexpected errors.
    """

    def __init__(self, sampler: PromptSampler, tell: Callable[[str], None] = lambda line: None) -> None:
        self._sampler = sampler
        self._tell = tell
        self._queue: queue.Queue[tuple[Job, Reply] | None] = queue.Queue()
        self._futures: dict[str, Future[Outcome]] = {}
        self._left: OrderedDict[str, float] = OrderedDict()
        self._given: OrderedDict[str, None] = OrderedDict()
        self._waiting = self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="tinker", daemon=True)
        self._thread.start()

    def submit(self, request: str, job: Job, size_bytes: int = 0) -> None:
        """Add a request to the queue, unless it is a repetition.

        Args:
            request: its name.
            job: its work.
            size_bytes: of its body, which is held until it is done.

        Raises:
            Full: too many wait, or too many bytes.
        """
        with self._lock:
            if request in self._futures:
                return
            if self._waiting >= MOST_WAITING or self._waiting_bytes + size_bytes > MOST_WAITING_BYTES:
                raise QueueFull(
                    f"{self._waiting} requests of {self._waiting_bytes} bytes wait already; ask again later."
                )
            self._drop_left()
            future: Future[Outcome] = Future()
            self._futures[request] = future
            self._waiting += 1
            self._waiting_bytes += size_bytes

        def reply(outcome: Outcome) -> None:
            with self._lock:
                if future.done():
                    return
                self._waiting -= 1
                self._waiting_bytes -= size_bytes
                self._left[request] = time.monotonic()
            future.set_result(outcome)

        self._queue.put((job, reply))

    def _drop_left(self) -> None:
        """Drop results beyond the limits that no client fetched."""
        long_ago_s = time.monotonic() - LEFT_S
        while self._left and (len(self._left) > MOST_LEFT or next(iter(self._left.values())) < long_ago_s):
            oldest, _ = self._left.popitem(last=False)
            self._futures.pop(oldest, None)

    def future(self, request: str) -> Future[Outcome] | None:
        """The future of a request; None for an unknown one."""
        with self._lock:
            return self._futures.get(request)

    def note_fetched(self, request: str) -> None:
        """Note that a result was fetched; the oldest fetched ones are dropped."""
        with self._lock:
            self._left.pop(request, None)
            self._given[request] = None
            self._given.move_to_end(request)
            while len(self._given) > KEPT:
                oldest, _ = self._given.popitem(last=False)
                self._futures.pop(oldest, None)

    def close(self) -> None:
        """Finish the current request and end the thread; waiting ones are refused."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=IDLE_S) if self._sampler.is_idle else self._queue.get_nowait()
            except queue.Empty:
                if not self._sampler.is_idle:
                    self._sampler.step()
                continue
            if job is None:
                return
            self._do(*job)

    def _do(self, job: Job, reply: Reply) -> None:
        try:
            job(reply)
        except SuperstepError as error:
            reply(error_of(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the next request is to be served
            self._tell("".join(traceback.format_exception(error)))
            reply(error_of(error))

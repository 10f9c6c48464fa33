"""The desk: what is asked for lies here until it is done, and its result until it is fetched.

    handlers ──submit──► queue ──► one thread: trains, saves, and between these steps of the sampler
        ▲                             │
        └──── wait(request) ◄── result┘

Requests run in the order in which they came. One that comes twice, as from a client whose connection broke, is the
same request: it is done once.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from superstep.errors import SuperstepError, UserError
from superstep.tune.tinker.sampler import Sampler

KEPT = 256
"""Results that are kept once they were given out: a connection may break on the way, and the client ask again."""

IDLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a request.

    Attributes:
        body: for the client.
        is_proto: whether it is protobuf; else JSON.
    """

    body: bytes
    is_proto: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Why nothing did.

    Attributes:
        message: one line.
        is_users: whether the client can mend it.
    """

    message: str
    is_users: bool


Outcome = Result | Failed
Reply = Callable[[Outcome], None]
Job = Callable[[Reply], None]
"""Does the work; the reply comes once, now or in a later step of the sampler."""


def failed(error: BaseException) -> Failed:
    """What a client is told of an error."""
    if isinstance(error, SuperstepError):
        return Failed(str(error), isinstance(error, UserError))
    return Failed(f"{type(error).__name__}: {error}".partition("\n")[0], is_users=False)


class Desk:
    """Requests and their results.

    Args:
        sampler: which the thread drives.
        tell: given a line about what should not have happened.
    """

    def __init__(self, sampler: Sampler, tell: Callable[[str], None] = lambda line: None) -> None:
        self._sampler = sampler
        self._tell = tell
        self._queue: queue.Queue[tuple[Job, Reply] | None] = queue.Queue()
        self._futures: dict[str, Future[Outcome]] = {}
        self._given: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="tinker", daemon=True)
        self._thread.start()

    def submit(self, request: str, job: Job) -> None:
        """Put a request in line, unless it is known already."""
        with self._lock:
            if request in self._futures:
                return
            future: Future[Outcome] = Future()
            self._futures[request] = future
        self._queue.put((job, lambda outcome: None if future.done() else future.set_result(outcome)))

    def future(self, request: str) -> Future[Outcome] | None:
        """What is waited for; None where it is not known."""
        with self._lock:
            return self._futures.get(request)

    def given(self, request: str) -> None:
        """Note that a result was given out; those of long ago go."""
        with self._lock:
            self._given[request] = None
            self._given.move_to_end(request)
            while len(self._given) > KEPT:
                oldest, _ = self._given.popitem(last=False)
                self._futures.pop(oldest, None)

    def close(self) -> None:
        """Finish what is being done and end the thread; what waits is refused."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            try:
                found = self._queue.get(timeout=IDLE_S) if self._sampler.is_idle else self._queue.get_nowait()
            except queue.Empty:
                if not self._sampler.is_idle:
                    self._sampler.step()
                continue
            if found is None:
                return
            self._do(*found)

    def _do(self, job: Job, reply: Reply) -> None:
        try:
            job(reply)
        except SuperstepError as error:
            reply(failed(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the next request is to be served
            self._tell("".join(traceback.format_exception(error)))
            reply(failed(error))

"""Stop requests: schedulers send SIGTERM before they kill a process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 128 + signal.SIGTERM
"""The exit status after a requested stop."""

AGAIN_S = 1.0
"""A second request comes at least this much later: torchrun and schedulers repeat a signal."""


GRACE_S = 25.0
"""Seconds that a server usually gives requests under way: less than the 30 s after which Kubernetes kills it."""


class StopRequest:
    """Whether this process was asked to stop after its current step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requested_s: float | None = None
        self.is_listening = False
        """Whether a request waits for the end of the step; else it ends the process."""

    @property
    def is_requested(self) -> bool:
        return self._requested_s is not None

    def ask(self) -> bool:
        """Note a request; returns whether it is a second one, which does not wait for a step."""
        if self._requested_s is None:
            self._requested_s = self._clock()
        return self._clock() - self._requested_s >= AGAIN_S


@contextmanager
def listening(stop: StopRequest, pass_on: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within the block SIGTERM requests a stop and is passed on; a second one raises SystemExit.

    Only the main thread of a process can listen; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.ask():
            raise SystemExit(128 + number)
        pass_on()

    before = signal.signal(signal.SIGTERM, on_signal)
    stop.is_listening = True
    try:
        yield
    finally:
        stop.is_listening = False
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

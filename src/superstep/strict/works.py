"""What a call of a communicator gives back, and the watchdog that ends a process whose calls do not end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

POLL_S = 0.2


class StreamWork(dist._Work):  # type: ignore[name-defined]
    """A call under way. ``wait`` has the current stream wait for it, and no host.

    Its tensors are kept until then, or until it is over, as ProcessGroupNCCL does since torch 2.8.
    """

    def __init__(self, end: torch.Event, tensors: Sequence[Tensor], what: str, limit: timedelta) -> None:
        super().__init__()
        self.end, self.what = end, what
        self.deadline_s = time.monotonic() + limit.total_seconds()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have what is issued to the current stream from now on come after the call."""
        self._order()
        self._tensors = []
        return True

    def _order(self) -> None:
        """By the current stream of the GPU that it runs on, which need not be the current one of the thread."""
        self.end.wait(torch.cuda.current_stream(self.end.device))

    def synchronize(self) -> None:
        """``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over on the device."""
        return self.end.query()

    def is_success(self) -> bool:
        """``is_completed``: what fails ends the process."""
        return self.is_completed()

    def result(self) -> list[Tensor]:
        """What it writes."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """What it writes, for work that is issued after ``wait``."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._order()
        future.set_result(self._tensors)
        return future


class BarrierWork(StreamWork):
    """A barrier, whose ``wait`` the host waits in."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once all members have come to it."""
        super().wait(timeout)
        self.end.synchronize()
        return True


class Watchdog:
    """Ends the process where a call does not end in time, as NCCL's does, and says what is under way."""

    def __init__(self, device: ModuleType) -> None:
        self._device = device
        self._works: list[StreamWork] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._owner = 0

    def watch(self, work: StreamWork) -> None:
        """Hold on to a work until it is over."""
        with self._lock:
            if self._owner != os.getpid():  # a fork has none of its parent's threads
                self._owner, self._works = os.getpid(), []
                self._thread = threading.Thread(target=self._run, name="strict watchdog", daemon=True)
                self._thread.start()
            self._works.append(work)

    def forget(self) -> None:
        """Of calls that were aborted nothing is awaited."""
        with self._lock:
            self._works.clear()

    def _run(self) -> None:
        while True:
            time.sleep(POLL_S)
            with self._lock:
                self._works = [work for work in self._works if not work.is_completed()]
                late = next((work for work in self._works if time.monotonic() > work.deadline_s), None)
            if late is not None:
                under_way = "; ".join(self._device.under_way())
                sys.stderr.write(
                    f"strict device: watchdog: {late.what} has not ended in its time; under way: {under_way}\n"
                )
                sys.stderr.flush()
                os.abort()

"""Results of a communicator's calls."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True, eq=False)
class PendingCall:
    """A running call, shared by its work and the watchdog.

    Attributes:
        queue: the number of its communicator's stream.
        what: the call in words.
        end: the event after it.
        deadline_s: its time limit, by the monotonic clock.
        tensors: kept until ``wait``, or until the watchdog sees its end.
    """

    queue: int
    what: str
    end: torch.Event
    deadline_s: float
    tensors: list[Tensor]


class StreamWork(dist._Work):  # type: ignore[name-defined]
    """A running call. ``wait`` makes the current stream wait for it, not the host.

    Its tensors are kept until then; without a wait, until it has ended and the watchdog releases them, as
    ProcessGroupNCCL does since torch 2.8.
    """

    def __init__(self, call: PendingCall) -> None:
        super().__init__()
        self.call, self.end = call, call.end

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order later work of the current stream after the call."""
        self._order()
        self.call.tensors = []
        return True

    def _order(self) -> None:
        """Order it in the current stream of the call's GPU, which need not be the thread's current one."""
        self.end.wait(torch.cuda.current_stream(self.end.device))

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended on the device."""
        return self.end.query()

    def is_success(self) -> bool:
        """The same as ``is_completed``: a failure ends the process."""
        return self.is_completed()

    def result(self) -> list[Tensor]:
        """Its outputs."""
        return self.call.tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Its outputs, for work that is issued after ``wait``."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._order()
        future.set_result(self.call.tensors)
        return future


class BarrierWork(StreamWork):
    """A barrier; its ``wait`` blocks the host."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once all members have reached it."""
        super().wait(timeout)
        self.end.synchronize()
        return True

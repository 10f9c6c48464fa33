"""What a call of a communicator gives back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call under way, as its work and the watchdog have it.

    Attributes:
        queue: the number of its communicator's stream.
        what: the call in words.
        end: the event behind it.
        deadline_s: when it has to be over, by the monotonic clock.
        tensors: what is kept until ``wait``, or until the watchdog finds it over.
    """

    queue: int
    what: str
    end: torch.Event
    deadline_s: float
    tensors: list[Tensor]


class StreamWork(dist._Work):  # type: ignore[name-defined]
    """A call under way. ``wait`` has the current stream wait for it, and no host.

    Its tensors are kept until then; where nobody waits, until it is over and the watchdog lets go of them, as
    ProcessGroupNCCL does since torch 2.8.
    """

    def __init__(self, call: PendingCall) -> None:
        super().__init__()
        self.call, self.end = call, call.end

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have what is issued to the current stream from now on come after the call."""
        self._order()
        self.call.tensors = []
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
        return self.call.tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """What it writes, for work that is issued after ``wait``."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._order()
        future.set_result(self.call.tensors)
        return future


class BarrierWork(StreamWork):
    """A barrier, whose ``wait`` the host waits in."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once all members have come to it."""
        super().wait(timeout)
        self.end.synchronize()
        return True

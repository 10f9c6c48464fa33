"""Backend: an engine as the HTTP handlers see it, on their event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from superstep.errors import Fault, SuperstepError
from superstep.serve.scheduling.request import Counters, ModelInfo, RequestUpdate, Sampling


class BackendBusy(SuperstepError):
    """The backend's queue is full: the request was not taken, and may be sent again."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BackendAway(Fault):
    """The engine is not available: it starts, restarts, sleeps or is paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the engine answers. ``state``: a word such as ``ready``, ``starting``, ``paused`` or ``asleep``."""

    is_ready: bool
    state: str


class Backend(Protocol):
    """An engine, seen from the event loop of the HTTP handlers. No method blocks."""

    @property
    def info(self) -> ModelInfo:
        """The current model; its version changes with the weights."""
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the available adapters."""
        ...

    def stream(
        self, prompt: tuple[int, ...], sampling: Sampling, *, priority: int = 0, adapter: str = "", salt: str = ""
    ) -> AsyncGenerator[RequestUpdate, None]:
        """The updates of one request, up to the one with a ``finish``.

        The request is taken when the first update is awaited. Closing the generator, or cancelling its consumer, aborts
        the request: its pages are free within an engine step.

        Raises:
            ConfigError: the request cannot be answered.
            Busy: there is no room for it now.
            Away: the engine is not available, or was lost on the way.
        """
        ...

    async def hear(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        heard: Callable[[RequestUpdate], bool],
        *,
        priority: int = 0,
        adapter: str = "",
        salt: str = "",
    ) -> None:
        """``stream`` for a consumer that only keeps the pieces: no task wakes up before the end.

        Args:
            heard: called with each update at once, on the event loop; returns whether that was enough.
            priority: smaller ones go first.
            salt: of the prefix cache.
        """
        ...

    def abort(self) -> int:
        """Abort all requests, each of which ends with ``abort``; returns their number."""
        ...

    def health(self) -> Health:
        """Whether requests are answered now."""
        ...

    def counters(self) -> Counters:
        """The engine's counters and state."""
        ...

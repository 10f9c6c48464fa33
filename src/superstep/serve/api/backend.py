"""What the HTTP handlers see of an engine, wherever it runs: a ``Backend``, on the event loop of the handlers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from superstep.errors import Fault, SuperstepError
from superstep.serve.scheduling.request import Counters, Info, RequestUpdate, Sampling


class Busy(SuperstepError):
    """The backend's queue is full: the request was not taken, and may be asked again."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Away(Fault):
    """The engine is not there: it starts, restarts, sleeps or is paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the engine answers.

    Attributes:
        is_ready: whether a request that comes now would be answered.
        state: in a word, such as ``ready``, ``starting``, ``paused`` or ``asleep``.
    """

    is_ready: bool
    state: str


class Backend(Protocol):
    """An engine, seen from the event loop of the HTTP handlers. No method blocks."""

    @property
    def info(self) -> Info:
        """Of the model that answers now; its version changes when weights do."""
        ...

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters that can be asked for."""
        ...

    def stream(
        self, prompt: tuple[int, ...], sampling: Sampling, *, priority: int = 0, adapter: str = "", salt: str = ""
    ) -> AsyncGenerator[RequestUpdate, None]:
        """The news of one request, up to the one that has a ``finish``.

        The request is taken when the first news is awaited. Closing the generator, or cancelling who awaits it, takes
        the request back: its pages are free within an engine step.

        Raises:
            ConfigError: what was asked cannot be answered.
            Busy: there is no room for it now.
            Away: the engine is not there, or was lost on the way.
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
        """As ``stream``, for who has nothing to do with a piece but to keep it: nobody is woken before the end.

        Args:
            prompt: token ids.
            sampling: how to draw.
            heard: is given each piece of news at once, on the event loop; whether that was enough.
            priority: smaller ones go first.
            adapter: to answer with.
            salt: of what is cached.
        """
        ...

    def abort(self) -> int:
        """Takes all requests back, each of which ends with ``abort``; returns how many there were."""
        ...

    def health(self) -> Health:
        """Whether requests are answered now."""
        ...

    def counters(self) -> Counters:
        """What the engine did and has."""
        ...

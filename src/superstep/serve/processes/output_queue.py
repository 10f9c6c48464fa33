"""Updates to the callers on the event loop: through a queue, or directly to a callback."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from superstep.errors import SuperstepError
from superstep.serve.scheduling.request import RequestUpdate


class OutputSink(Protocol):
    """The receiver of one request's updates."""

    @property
    def is_over(self) -> bool:
        """Whether the last update has arrived."""

    def put(self, news: RequestUpdate | SuperstepError) -> None:
        """Add an update."""


class OutputQueue:
    """A queue of updates. An ``asyncio.Queue`` takes twice the work for each."""

    def __init__(self) -> None:
        self.is_over = False
        self._came: deque[RequestUpdate | SuperstepError] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, news: RequestUpdate | SuperstepError) -> None:
        """Add an update."""
        self._came.append(news)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> RequestUpdate:
        """The oldest update. Only one task may wait at a time.

        Raises:
            SuperstepError: the request's error.
        """
        while not self._came:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        news = self._came.popleft()
        if isinstance(news, SuperstepError):
            self.is_over = True
            raise news
        self.is_over = news.finish is not None
        return news


class OutputListener:
    """Passes all updates to a callback.

    Args:
        heard: called with each update; returns whether it was the last one needed.

    Attributes:
        end: done after the last update; has the request's error.
    """

    def __init__(self, heard: Callable[[RequestUpdate], bool]) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False
        self._heard = heard

    def put(self, news: RequestUpdate | SuperstepError) -> None:
        """Add an update."""
        if self.end.done():  # ended already, with more updates in transit
            return
        try:
            if isinstance(news, SuperstepError):
                self.is_over = True
                raise news
            self.is_over = news.finish is not None
            if self._heard(news) or self.is_over:
                self.end.set_result(None)
        except Exception as error:  # noqa: BLE001  # for who waits, whatever it is
            self.end.set_exception(error)

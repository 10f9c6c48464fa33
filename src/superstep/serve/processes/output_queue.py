"""News on its way to who asked, on the event loop: in a box that is emptied one by one, or straight into an ear."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from superstep.errors import SuperstepError
from superstep.serve.scheduling.request import RequestUpdate


class OutputSink(Protocol):
    """Where the news of one request goes."""

    @property
    def is_over(self) -> bool:
        """Whether the engine has said its last of the request."""

    def put(self, news: RequestUpdate | SuperstepError) -> None:
        """The next news."""


class OutputQueue:
    """News that waits until it is asked for. An ``asyncio.Queue`` does twice the work for each piece."""

    def __init__(self) -> None:
        self.is_over = False
        self._came: deque[RequestUpdate | SuperstepError] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, news: RequestUpdate | SuperstepError) -> None:
        """The next news."""
        self._came.append(news)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> RequestUpdate:
        """The oldest news. One task asks at a time.

        Raises:
            SuperstepError: that is the news.
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
    """Is told all as it comes.

    Args:
        heard: is given each piece of news; whether that was enough.

    Attributes:
        end: done once there is no more to hear; has the error that was the news.
    """

    def __init__(self, heard: Callable[[RequestUpdate], bool]) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False
        self._heard = heard

    def put(self, news: RequestUpdate | SuperstepError) -> None:
        """The next news."""
        if self.end.done():  # it was enough, and more was on its way
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

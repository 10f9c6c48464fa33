"""Draining: at a server's end, requests under way are answered and new ones refused, until all are done or time is
over.

begin ──► new requests: 503, Retry-After; /health: draining ──► all answered, or grace is over ──► finish
                                              unfinished requests then end with 503, streams with an error event
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from superstep.http.limits import CLOSE
from superstep.http.request_error import RequestError
from superstep.http.sse import MEDIA, Form, event

FORMS: tuple[Form, ...] = ("sse", "lines")

LAST_S = 2.0
"""Seconds to send the errors of unfinished answers: a client may not be reading."""

Refuse = Callable[[RequestError], Response]
"""Makes a refusal the response that a server's clients expect."""


class Drain:
    """The requests that a server has under way. Only ``is_begun`` may be read outside its event loop."""

    def __init__(self) -> None:
        self.under_way: set[asyncio.Task[Any]] = set()
        self._ends_s = math.inf
        self._begun = asyncio.Event()
        self._hurried = asyncio.Event()

    @property
    def is_begun(self) -> bool:
        return self._begun.is_set()

    @property
    def refusal(self) -> RequestError:
        """The error for a new request."""
        wait_s = max(1, math.ceil(min(self._ends_s - time.monotonic(), 3600.0)))
        headers = CLOSE | {"Retry-After": str(wait_s)}
        return RequestError("the server is shutting down; ask again.", status=503, code="draining", headers=headers)

    async def wait_begun(self) -> None:
        await self._begun.wait()

    def begin(self, grace_s: float) -> None:
        """Refuse new requests; those under way have ``grace_s`` seconds."""
        self._ends_s = time.monotonic() + grace_s
        self._begun.set()

    def hurry(self) -> None:
        """End the grace now."""
        self._ends_s = time.monotonic()
        self._hurried.set()

    async def finish(self) -> int:
        """Wait for the requests under way, cancel those that outlast the grace, and return their number."""
        hurried = asyncio.ensure_future(self._hurried.wait())
        while self.under_way and not hurried.done() and (left_s := self._ends_s - time.monotonic()) > 0:
            await asyncio.wait({*self.under_way, hurried}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        unfinished = list(self.under_way)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=LAST_S)
        return len(unfinished)


class Draining:
    """ASGI middleware: counts requests under way, refuses new ones while the server drains, and ends cancelled ones
    with an error.

    Args:
        refuse: makes an error response.
        open_paths: paths that are answered also while the server drains.
    """

    def __init__(self, app: ASGIApp, *, drain: Drain, refuse: Refuse, open_paths: Collection[str]) -> None:
        self._app, self._drain, self._refuse, self._open_paths = app, drain, refuse, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._drain.is_begun and scope["path"] not in self._open_paths:
            await self._refuse(self._drain.refusal)(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        answer = _Answer(send)
        self._drain.under_way.add(task)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:  # this is the whole of the task: nobody waits for it to be cancelled
            task.uncancel()
            await self._end(answer, scope, receive)
        finally:
            self._drain.under_way.discard(task)

    async def _end(self, answer: _Answer, scope: Scope, receive: Receive) -> None:
        refused = self._drain.refusal
        if not answer.has_begun:
            await self._refuse(refused)(scope, receive, answer.send)
        elif not answer.is_whole:
            forms = [form for form in FORMS if MEDIA[form] == answer.media]
            last = b"".join(event(refused.body, form) for form in forms)
            await answer.send({"type": "http.response.body", "body": last, "more_body": False})


class _Answer:
    """A response under way: how much of it was sent."""

    def __init__(self, send: Send) -> None:
        self.has_begun = self.is_whole = False
        self.media = ""
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.media = dict(message["headers"]).get(b"content-type", b"").decode("latin-1")
        elif message["type"] == "http.response.body":
            self.is_whole = not message.get("more_body", False)
        await self._send(message)

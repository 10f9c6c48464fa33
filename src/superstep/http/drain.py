"""The end of a server: requests under way are answered, new ones refused, until all are done or the grace is over.

begin ──► new requests: 503, Retry-After; /health: draining ──► all answered, or the grace is over ──► finish
                                              what is unfinished then ends with 503, a stream with an error event
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
"""How long the errors of unfinished answers may take to be sent: a client may not be reading."""

Refuse = Callable[[RequestError], Response]
"""A refusal as a server's clients read it."""


class Drain:
    """What one server has under way. All but ``is_begun`` is for its event loop."""

    def __init__(self) -> None:
        self.under_way: set[asyncio.Task[Any]] = set()
        self._ends_s = math.inf
        self._begun = asyncio.Event()
        self._hurried = asyncio.Event()

    @property
    def is_begun(self) -> bool:
        """Whether new requests are refused."""
        return self._begun.is_set()

    @property
    def refusal(self) -> RequestError:
        """What who asks now is told."""
        wait_s = max(1, math.ceil(min(self._ends_s - time.monotonic(), 3600.0)))
        headers = CLOSE | {"Retry-After": str(wait_s)}
        return RequestError("the server is shutting down; ask again.", status=503, code="draining", headers=headers)

    async def wait_begun(self) -> None:
        """Wait for ``begin``."""
        await self._begun.wait()

    def begin(self, grace_s: float) -> None:
        """Refuse new requests; those under way have so many seconds."""
        self._ends_s = time.monotonic() + grace_s
        self._begun.set()

    def hurry(self) -> None:
        """The grace is over now."""
        self._ends_s = time.monotonic()
        self._hurried.set()

    async def finish(self) -> int:
        """Wait for the requests under way, and end those that the grace does not suffice for; how many these were."""
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
    """ASGI middleware: notes requests under way, refuses those that come while the server drains, and ends with an
    error those that are cancelled.

    Args:
        app: what answers.
        drain: of the server.
        refuse: makes a refusal a response.
        open_paths: which are answered also while the server drains.
    """

    def __init__(self, app: ASGIApp, *, drain: Drain, refuse: Refuse, open_paths: Collection[str]) -> None:
        self._app, self._drain, self._refuse, self._open_paths = app, drain, refuse, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
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
    """A response on its way out: how far it has come."""

    def __init__(self, send: Send) -> None:
        self.has_begun = self.is_whole = False
        self.media = ""
        self._send = send

    async def send(self, message: Message) -> None:
        """Hand on a part of it."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.media = dict(message["headers"]).get(b"content-type", b"").decode("latin-1")
        elif message["type"] == "http.response.body":
            self.is_whole = not message.get("more_body", False)
        await self._send(message)

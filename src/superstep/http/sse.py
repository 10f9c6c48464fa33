"""Answers on the wire: server-sent events, lines of JSON, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from superstep.errors import SuperstepError
from superstep.http.request_error import RequestError

T = TypeVar("T")

Convert = Callable[[SuperstepError], RequestError]
"""Makes an error that is no ``RequestError`` one for the server's clients."""

Form = Literal["sse", "lines"]
MEDIA = {"sse": "text/event-stream; charset=utf-8", "lines": "application/x-ndjson"}
DONE = b"data: [DONE]\n\n"


class ClientDisconnected(Exception):
    """The client disconnected."""


def event(value: object, form: Form = "sse") -> bytes:
    """A value as one event or one line."""
    body = msgspec.json.encode(value)
    return b"data: " + body + b"\n\n" if form == "sse" else body + b"\n"


def respond(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await some work; cancel it as soon as the client disconnects. Raises Gone where the client disconnected."""
    task = asyncio.ensure_future(work)
    await _first_of(task, request.receive)
    if task.cancelled():
        raise ClientDisconnected
    return task.result()


async def stream_response(
    request: Request, events: AsyncGenerator[bytes, None], convert: Convert, form: Form = "sse"
) -> Response:
    """A response that sends events as they come.

    The first event is awaited before the response begins, so that an early refusal has a status of its own.

    Args:
        request: watched for the client's disconnection.
        events: closed when the client disconnects.
        convert: makes an error that ends the events a ``RequestError``.
    """
    first = await until_gone(request, _first(events))
    return Events(first, events, convert, form)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


class Events(Response):
    """Sends events until they end or the client disconnects, and then closes their source."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], convert: Convert, form: Form) -> None:
        super().__init__(media_type=MEDIA[form], headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._events, self._convert, self._form = first, events, convert, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a disconnected client raises nothing."""
        task = asyncio.ensure_future(self._send(send))
        await _first_of(task, receive)
        if not task.cancelled():
            task.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events):
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for chunk in self._events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except (SuperstepError, RequestError) as error:  # the status has been sent; the client reads of it here
                refused = error if isinstance(error, RequestError) else self._convert(error)
                await send({"type": "http.response.body", "body": event(refused.body, self._form), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _first_of(task: asyncio.Future[Any], receive: Receive) -> None:
    """Wait for the work or for the client's disconnection, whichever is first; cancel the other."""
    gone = asyncio.ensure_future(_wait_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

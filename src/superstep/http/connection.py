"""Limits of a connection: time for a request's head, their number, and how long a client may not read.

uvicorn limits only the silence between two requests.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from superstep.http.guard import HEAD_BYTES, head_too_large
from superstep.http.request_error import RequestError

FLUSH_S = 1.0
"""Seconds that a closed connection may take to send what was written to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        count: at once. One more closes the one idle for longest; where all are busy, the new one is refused.
        head_s: until a request's head is complete, from the connection's start or the first byte after an answer.
        unread_s: how long a client may not read what is sent to it.
    """

    count: int = 2048
    head_s: float = 10.0
    unread_s: float = 300.0


class Connection(HttpToolsProtocol):
    limits: ClassVar[ConnectionLimits] = ConnectionLimits()

    @property
    def is_idle(self) -> bool:
        """Whether it has no request to answer."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._is_in_body = self._is_refused = False
        self._idle_since_s = time.monotonic()
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._await_head()
        if len(self.connections) > self.limits.count:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_wait()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self.transport.is_closing() or self._is_refused or not self.is_idle:
            return
        # A head that is not whole, or the rest of a body whose request was answered already.
        self._await_head()
        if not self._is_in_body:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(head_too_large())

    def on_message_begin(self) -> None:
        self._is_in_body = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_wait()
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._idle_since_s = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self.limits.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Close: nothing came for long after an answer."""
        self._close()

    def shutdown(self) -> None:
        """The server ends; requests are answered."""
        super().shutdown()
        self.loop.call_later(FLUSH_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(RequestError(f"{msg} Send HTTP/1.1.", code="invalid_http"))

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_s, self._end_slow_head)

    def _end_wait(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_slow_head(self) -> None:
        if self._head_bytes:
            why = f"the request's head was not whole after {self.limits.head_s:g} s; send it at once."
            self._refuse(RequestError(why, status=408, code="head_stalled"))
        else:  # a client that connects ahead of need expects no answer
            self._close()

    def _make_room(self) -> None:
        idle = [one for one in self.connections if isinstance(one, Connection) and one is not self and one.is_idle]
        if idle:
            min(idle, key=lambda one: one._idle_since_s)._close()
        else:
            why = f"all {self.limits.count} connections are in use; ask again."
            self._refuse(RequestError(why, status=503, code="too_many_connections", headers={"Retry-After": "1"}))

    def _refuse(self, error: RequestError) -> None:
        """Answer outside of the application. Later bytes are ignored, so that they cannot close the connection too
        early.
        """
        self._is_refused = True
        body = msgspec.json.encode(error.body)
        headers = error.headers | {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            *(f"{k}: {v}" for k, v in headers.items()),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.write_eof()
        self.connections.discard(self)
        self.loop.call_later(FLUSH_S, self.transport.abort)

    def _close(self) -> None:
        self.connections.discard(self)
        self.transport.close()
        self.loop.call_later(FLUSH_S, self.transport.abort)


def connections_within(limits: ConnectionLimits) -> type[Connection]:
    """A connection class with limits; uvicorn makes its instances."""
    return type("LimitedConnection", (Connection,), {"limits": limits})

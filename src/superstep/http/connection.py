"""A connection, held to limits: how long a request's head may take, how many there may be, how long a client may not
read. uvicorn has a limit for the silence between two requests alone.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from superstep.http.guard import HEAD_BYTES, too_large_a_head
from superstep.http.request_error import RequestError

FLUSH_S = 1.0
"""How long a connection that is closed may take to be rid of what was written to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What connections may cost.

    Attributes:
        count: at once. One more closes the one that has had no request for longest; where all have one, it is refused.
        head_s: from its begin, or from the first byte after an answer, until a request's head is there.
        unread_s: how long a client may read nothing of what is sent to it.
    """

    count: int = 2048
    head_s: float = 10.0
    unread_s: float = 300.0


class Connection(HttpToolsProtocol):
    """One connection."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()

    @property
    def is_idle(self) -> bool:
        """Whether it has no request that is to be answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
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
        """It has gone."""
        super().connection_lost(exc)
        self._end_wait()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Some bytes of it."""
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
                self._refuse(too_large_a_head())

    def on_message_begin(self) -> None:
        """A head begins."""
        self._is_in_body = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._end_wait()
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A body is whole."""
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request is answered."""
        self._idle_since_s = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self.limits.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for long after an answer."""
        self._close()

    def shutdown(self) -> None:
        """The server ends; it has answered."""
        super().shutdown()
        self.loop.call_later(FLUSH_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """What was sent is no HTTP."""
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
        """Answer outside of the application. What still comes is not read, and closes nothing over the answer."""
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
    """Connections that keep to some limits; uvicorn makes them."""
    return type("LimitedConnection", (Connection,), {"limits": limits})

"""Checks of a request before any handler, for every server.

Host           must be a name of this server. A page of another site whose name resolves to this machine (DNS rebinding)
               sends that site's name.
Content-Type   must be one that the server reads. A browser sends it from another origin only after a preflight request.
size           of path and headers: at most ``HEAD_BYTES``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from superstep.http.drain import Drain, Draining, Refuse
from superstep.http.limits import CLOSE, BodyLimits, read_body
from superstep.http.request_error import RequestError, show
from superstep.observe.http_access import LOCALHOST, HostNames

JSON = "application/json"
BODILESS = ("GET", "HEAD", "OPTIONS")
"""Methods without a body."""

OPEN_PATHS = ("/health", "/metrics")
"""Paths that are answered also while the server drains."""

HEAD_BYTES = 32 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """The checks before a server's handlers. ``hosts``: the host names that the server accepts."""

    hosts: HostNames = field(default_factory=HostNames)
    drain: Drain = field(default_factory=Drain)

    def middleware(
        self, refuse: Refuse, limits: BodyLimits, *, media: Collection[str], open_paths: Collection[str]
    ) -> list[Middleware]:
        """The middleware for Starlette, the outermost first.

        Args:
            refuse: makes an error response.
            limits: limits of a body that is read before its request is refused.
            media: content types that the server reads.
            open_paths: paths that are answered also while the server drains.
        """
        return [
            Middleware(Draining, drain=self.drain, refuse=refuse, open_paths=open_paths),
            Middleware(Guard, hosts=self.hosts, media=media, refuse=refuse, limits=limits),
        ]


class Guard:
    """ASGI middleware that passes valid requests on; for the arguments see ``Entrance``."""

    def __init__(
        self, app: ASGIApp, *, hosts: HostNames, media: Collection[str], refuse: Refuse, limits: BodyLimits
    ) -> None:
        self._app, self._hosts, self._media, self._refuse, self._limits = app, hosts, media, refuse, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            _check_size(scope)
            self._check_host(request)
            await self._check_media(request)
        except RequestError as error:
            await self._refuse(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_host(self, request: Request) -> None:
        given = request.headers.getlist("host")
        if not self._hosts.accept(given):
            raise RequestError(
                f"host = {show(', '.join(given))} is not a name of this server; use {LOCALHOST}, or start it with "
                "--allowed-hosts.",
                status=421,
                param="host",
                code="unknown_host",
                headers=CLOSE,
            )

    async def _check_media(self, request: Request) -> None:
        headers = request.headers
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if not has_body or request.method in BODILESS:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in self._media:
            await read_body(request, self._limits)  # closing with unread bytes would lose the response
            raise RequestError(
                f"content-type is {show(kind)}; send {' or '.join(self._media)}.", status=415, param="content-type"
            )


def _check_size(scope: Scope) -> None:
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in scope["headers"])
    if size > HEAD_BYTES:
        raise head_too_large()


def head_too_large() -> RequestError:
    """The error for more than ``HEAD_BYTES`` before a body."""
    return RequestError(
        f"path and headers are over the limit of {HEAD_BYTES} bytes; send less.",
        status=431,
        code="head_too_large",
        headers=CLOSE,
    )

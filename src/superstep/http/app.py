"""Application: which path goes to which handler, and how errors of handlers become responses.

make_app(routes, state, ...)    routes are (method, path, handler); a handler receives the request and the state
with_key(handler, key, scheme)  the handler, for clients that know the key
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from superstep.errors import SuperstepError
from superstep.http.drain import Refuse
from superstep.http.guard import JSON, OPEN_PATHS, Entrance
from superstep.http.limits import BodyLimits
from superstep.http.request_error import RequestError
from superstep.http.sse import ClientDisconnected, Convert
from superstep.observe.http_access import bearer_key, is_same_key

S = TypeVar("S")
Handler = Callable[[Request, S], Awaitable[Response]]
Routes = Sequence[tuple[str, str, Handler[S]]]

GONE_STATUS = 499
"""The status in the log for a request whose client went away. Nobody reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResponses:
    """How errors are answered.

    Attributes:
        refuse: makes an error response, and counts it.
        convert: makes a handler's other errors a ``RequestError``.
        unknown_path: the message for a path or method that is not served; None lists the paths.
    """

    refuse: Refuse
    convert: Convert
    unknown_path: Callable[[Request, HTTPException], str] | None = None


def make_app(
    routes: Routes[S],
    state: S,
    *,
    entrance: Entrance,
    errors: ErrorResponses,
    limits: BodyLimits,
    media: Collection[str] = (JSON,),
    open_paths: Collection[str] = OPEN_PATHS,
) -> Starlette:
    """Build an application.

    Args:
        state: passed to each handler.
        entrance: what stands before it.
        errors: how they are answered.
        limits: of a body that is refused once it was read.
        media: types of bodies that are read.
        open_paths: which are answered also while the server drains.
    """

    def endpoint(handler: Handler[S]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request, state)
            except ClientDisconnected:
                return Response(status_code=GONE_STATUS)
            except RequestError as error:
                return errors.refuse(error)
            except SuperstepError as error:
                return errors.refuse(errors.convert(error))

        return answer

    async def no_such_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = errors.unknown_path(request, error) if errors.unknown_path else _list_paths(request, error, routes)
        return errors.refuse(
            RequestError(message, status=error.status_code, code="no_such_path", headers=error.headers)
        )

    return Starlette(
        routes=[Route(path, endpoint(handler), methods=[method]) for method, path, handler in routes],
        middleware=entrance.middleware(errors.refuse, limits, media=media, open_paths=open_paths),
        exception_handlers={HTTPException: no_such_path},
    )


def _list_paths(request: Request, error: HTTPException, routes: Routes[S]) -> str:
    if error.status_code == 404:
        known = ", ".join(f"{method} {path}" for method, path, _ in routes)
        return f"{request.url.path!a} is not served; the paths are: {known}."
    allowed = (error.headers or {}).get("Allow", "")
    return f"{request.method} {request.url.path!a}: {error.detail}{f'; use {allowed}' if allowed else ''}."


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """How clients send a key.

    Attributes:
        read: the key in a request; empty where there is none.
        refuse: makes the error for a wrong key.
    """

    read: Callable[[Request], str]
    refuse: Callable[[], RequestError]


def read_bearer(request: Request) -> str:
    return bearer_key(request.headers.get("authorization", ""))


def with_key(handler: Handler[S], key: str, scheme: KeyScheme) -> Handler[S]:
    """The handler, for clients that know the key."""

    async def answer(request: Request, state: S) -> Response:
        if not is_same_key(scheme.read(request), key):
            raise scheme.refuse()
        return await handler(request, state)

    return answer


def metrics_response(registry: CollectorRegistry) -> Response:
    """All metrics, in Prometheus's text format."""
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

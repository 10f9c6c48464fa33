"""The application: which path goes to which handler, and what becomes of what they raise."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from superstep.errors import SuperstepError
from superstep.serve.api.admin import ADMIN_ROUTES, with_key
from superstep.serve.api.admin_backend import Admin
from superstep.serve.api.app_state import AppState
from superstep.serve.api.backend import Backend
from superstep.serve.api.generate_endpoint import generate
from superstep.serve.api.guard import OPEN_PATHS, Entrance
from superstep.serve.api.health import health, metrics
from superstep.serve.api.http_errors import RequestError, refused_by_backend
from superstep.serve.api.limits import Limits, Queue
from superstep.serve.api.metrics import ServeMetrics
from superstep.serve.api.openai.chat import chat_completions
from superstep.serve.api.openai.completions import completions
from superstep.serve.api.openai.models import model, models
from superstep.serve.api.page import page
from superstep.serve.api.sse import Gone
from superstep.serve.api.text_protocol import TextProtocol
from superstep.serve.api.tokenize_endpoint import detokenize, tokenize

Handler = Callable[[Request, AppState], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/", page),
    ("GET", "/health", health),
    ("GET", "/metrics", metrics),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{model:path}", model),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/generate", generate),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
)

GONE_STATUS = 499
"""What is noted of a request whose client went away. Nobody reads it."""


def make_app(
    backend: Backend,
    words: TextProtocol,
    *,
    limits: Limits | None = None,
    admin: Admin | None = None,
    entrance: Entrance | None = None,
) -> Starlette:
    """The application of one engine.

    Args:
        backend: the engine.
        words: the text part of its model.
        limits: of requests; the ordinary ones where there are none.
        admin: what paths for whoever runs the server need; None serves none of them.
        entrance: what stands before it; None lets loopback names in.
    """
    limits, entrance = limits or Limits(), entrance or Entrance()
    service = AppState(
        backend=backend,
        words=words,
        limits=limits,
        queue=Queue(limits.queue),
        metrics=ServeMetrics(backend, entrance.drain),
        drain=entrance.drain,
        began_s=int(time.time()),
        admin=admin,
    )
    guarded = [(method, path, with_key(handler)) for method, path, handler in ADMIN_ROUTES if admin is not None]
    served = (*ROUTES, *guarded)
    routes = [Route(path, _endpoint(handler, service), methods=[method]) for method, path, handler in served]

    def refuse(error: RequestError) -> Response:
        service.metrics.refuse(error.status)
        return error.response()

    before = entrance.middleware(refuse, limits, open_paths=OPEN_PATHS)
    return Starlette(routes=routes, middleware=before, exception_handlers={HTTPException: _no_such_path})


def _endpoint(handler: Handler, service: AppState) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request, service)
        except Gone:
            return Response(status_code=GONE_STATUS)
        except (RequestError, SuperstepError) as error:
            refused = error if isinstance(error, RequestError) else refused_by_backend(error)
            service.metrics.refuse(refused.status)
            return refused.response()

    return answer


async def _no_such_path(request: Request, error: Exception) -> Response:
    """In the form that clients read. Paths are listed: there are few."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        known = ", ".join(f"{method} {path}" for method, path, _ in ROUTES)
        message = f"{request.url.path!a} is not served; the paths are: {known}."
    else:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.method} {request.url.path!a}: {error.detail}{f'; use {allowed}' if allowed else ''}."
    return RequestError(message, status=error.status_code, code="no_such_path", headers=error.headers).response()

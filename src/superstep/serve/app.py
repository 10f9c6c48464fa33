"""The application of one engine: which path goes to which handler."""

from __future__ import annotations

import time

from starlette.applications import Starlette
from starlette.responses import Response

from superstep.http import app as http_app
from superstep.http.app import ErrorResponses, Routes
from superstep.http.guard import Entrance
from superstep.http.limits import Queue
from superstep.http.request_error import RequestError
from superstep.serve.api.admin import admin_routes
from superstep.serve.api.admin_backend import Admin
from superstep.serve.api.app_state import AppState
from superstep.serve.api.backend import Backend
from superstep.serve.api.backend_errors import make_backend_refusal
from superstep.serve.api.generate_endpoint import generate
from superstep.serve.api.limits import Limits
from superstep.serve.api.metrics import ServeMetrics
from superstep.serve.api.openai.chat import chat_completions
from superstep.serve.api.openai.completions import completions
from superstep.serve.api.openai.models import model, models
from superstep.serve.api.openai.tokenize_endpoint import detokenize, tokenize
from superstep.serve.api.pages import health, metrics, page
from superstep.serve.api.text_protocol import TextProtocol

ROUTES: Routes[AppState] = (
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


def make_app(
    backend: Backend,
    words: TextProtocol,
    *,
    limits: Limits | None = None,
    admin: Admin | None = None,
    entrance: Entrance | None = None,
) -> Starlette:
    """Build the application of one engine.

    Args:
        words: the text part of its model.
        limits: None means the defaults.
        admin: None serves no admin paths.
        entrance: checks before the handlers; None accepts loopback host names only.
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
    routes = (*ROUTES, *(admin_routes(admin.key) if admin is not None else ()))

    def refuse(error: RequestError) -> Response:
        service.metrics.refuse(error.status)
        return error.response()

    return http_app.make_app(
        routes,
        service,
        entrance=entrance,
        errors=ErrorResponses(refuse=refuse, convert=make_backend_refusal),
        limits=limits,
    )

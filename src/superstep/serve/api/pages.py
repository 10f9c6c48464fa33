"""GET /, /health and /metrics: for people and monitoring.

The chat page is one file without external parts, so that it works without a network.
"""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superstep.http.app import metrics_response
from superstep.serve.api.app_state import AppState

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing is loaded from elsewhere, even if the model's answer says so."""


async def page(request: Request, service: AppState) -> Response:
    text = resources.files("superstep.serve.api").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(text, media_type="text/html", headers=headers)


async def health(request: Request, service: AppState) -> Response:
    """Answer 200 where a new request would be answered, else 503."""
    now, info = service.health(), service.backend.info
    status = {"status": now.state, "model": info.name, "version": info.version}
    return JSONResponse(status, status_code=200 if now.is_ready else 503)


async def metrics(request: Request, service: AppState) -> Response:
    return metrics_response(service.metrics.registry)

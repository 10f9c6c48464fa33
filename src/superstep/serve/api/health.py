"""GET /health and /metrics: for those who watch the server."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superstep.serve.api.app_state import AppState


async def health(request: Request, service: AppState) -> Response:
    """200 where a request that comes now would be answered, 503 where not."""
    now, info = service.health(), service.backend.info
    told = {"status": now.state, "model": info.name, "version": info.version}
    return JSONResponse(told, status_code=200 if now.is_ready else 503)


async def metrics(request: Request, service: AppState) -> Response:
    """All numbers, in Prometheus's text form."""
    return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

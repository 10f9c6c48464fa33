"""GET /v1/models: the model and its adapters."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from superstep.http.sse import respond
from superstep.serve.api.app_state import AppState


async def models(request: Request, service: AppState) -> Response:
    names = [service.backend.info.name, *service.backend.adapters]
    return respond({"object": "list", "data": [card(name, service) for name in names]})


async def model(request: Request, service: AppState) -> Response:
    name = str(request.path_params["model"])
    service.adapter_of(name)
    return respond(card(name, service))


def card(name: str, service: AppState) -> dict[str, Any]:
    """A model in the list; an adapter names the model that it changes."""
    info = service.backend.info
    return {
        "id": name,
        "object": "model",
        "created": service.began_s,
        "owned_by": "superstep",
        "max_model_len": info.context_tokens,
        "root": info.name,
        "parent": None if name == info.name else info.name,
        "version": info.version,
    }

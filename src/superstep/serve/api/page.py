"""GET /: a page to chat on. One file with nothing from elsewhere, so that it works without a network."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from superstep.serve.api.app_state import AppState

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing is loaded from elsewhere, even if an answer of the model says so."""


async def page(request: Request, service: AppState) -> Response:
    """The page."""
    text = resources.files("superstep.serve.api").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(text, media_type="text/html", headers=headers)

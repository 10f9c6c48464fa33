"""RequestError: a request that is refused, in OpenAI's wire format.

    {"error": {"message": "n = 0 must be from 1 to 128.", "type": "invalid_request_error", "param": "n", "code": ...}}

Unreadable fields, unknown fields and values out of range are all 400, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""The type of an error by its status; other 4xx are invalid requests, 5xx are server errors."""

SHOWN_CHARS = 60
"""The most characters of a wrong value in an error message."""


class RequestError(Exception):
    """A refused request, with its status and the field at fault.

    Attributes:
        message: one line: field, value, rule and what would work.
        param: the field's path in the body.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body, in OpenAI's form."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


def show(value: object) -> str:
    """A value for an error message: short, and safe in any encoding."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."

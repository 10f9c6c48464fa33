"""A request that is not answered: one exception, and its form on the wire, which is OpenAI's.

    {"error": {"message": "n = 0 must be from 1 to 128.", "type": "invalid_request_error", "param": "n", "code": ...}}

A field that cannot be read, an unknown one, and a value that no engine could answer are all 400, as OpenAI's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""The type of an error, by its status; other 4xx are invalid requests, 5xx are the server's."""

SHOWN_CHARS = 60
"""The most of a wrong value that is told back."""


class RequestError(Exception):
    """A request that is not answered, with the status and the field that is to blame.

    Attributes:
        message: one line: field, value, rule and what would work.
        status: of HTTP.
        param: the field, by its path in the body.
        code: a word that programs test.
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
        """What goes over the wire, in OpenAI's form."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole response."""
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


def show(value: object) -> str:
    """A value as it is told back to who sent it: short, and safe in any encoding."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."

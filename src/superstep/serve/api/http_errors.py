"""Requests that are not answered: one exception, and its form on the wire, which is OpenAI's.

    {"error": {"message": "n = 0 must be from 1 to 128.", "type": "invalid_request_error", "param": "n", "code": ...}}

A field that cannot be read, an unknown one, and a value that no engine could answer are all 400, as OpenAI's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pydantic
from pydantic_core import ErrorDetails
from starlette.responses import JSONResponse, Response

from superstep.errors import ConfigError, Fault, SuperstepError, did_you_mean
from superstep.serve.api.backend import Away, Busy

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


def refused_by_backend(error: SuperstepError, *, names: Mapping[str, str] | None = None) -> RequestError:
    """What a client is told of an error of the backend or of the text part.

    Args:
        error: a ``ConfigError`` begins with the name of the field that it is about.
        names: what a field is called in this endpoint, where it is not what the engine calls it.
    """
    match error:
        case Busy():
            wait = str(max(1, round(error.retry_after_s)))
            return RequestError(str(error), status=429, code="queue_full", headers={"Retry-After": wait})
        case Away():
            return RequestError(str(error), status=503, code="engine_away", headers={"Retry-After": "1"})
        case ConfigError():
            return _of_config(str(error), names or {})
        case Fault():
            return RequestError(str(error), status=500, code="engine_failed")
        case _:
            return RequestError(str(error))


def _of_config(message: str, names: Mapping[str, str]) -> RequestError:
    first = re.match(r"[a-z_][a-z_0-9.\[\]]*(?= )", message)
    if first is None:
        return RequestError(message)
    name = names.get(first[0], first[0])
    if message.startswith("adapter = ") and " is not loaded" in message:  # it went while the request came
        return RequestError(message, status=404, param=name, code="model_not_found")
    return RequestError(name + message[first.end() :], param=name, code="invalid_value")


def refused_by_model(error: pydantic.ValidationError, known: Iterable[str]) -> RequestError:
    """What a client is told of a body that does not have the form of its endpoint: the first of its mistakes.

    Args:
        error: of pydantic.
        known: the fields of the body, for a guess at what an unknown one was meant to be.
    """
    details = error.errors(include_url=False, include_context=True)
    # Of the errors of a union's branches, the deepest belongs to the branch that was meant.
    first = _path(details[0]["loc"]).split(".")[0].split("[")[0]
    same = [one for one in details if _path(one["loc"]).split(".")[0].split("[")[0] == first]
    worst = max(same, key=lambda one: len(_places(one["loc"])))
    return _of_detail(worst, known)


def _of_detail(detail: ErrorDetails, known: Iterable[str]) -> RequestError:
    path, value = _path(detail["loc"]), detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            # The last is the client's own word, which may look like a type.
            path = f"{_path(detail['loc'][:-1])}.{detail['loc'][-1]}".removeprefix(".")
            top = len(detail["loc"]) == 1
            guess = did_you_mean(path, sorted(known)) if top else "."
            hint = guess if guess.startswith("; did you mean") else "; leave it out."
            return RequestError(f"{path} is not a field that is known here{hint}", param=path, code="unknown_field")
        case "missing":
            return RequestError(f"{path} is missing; give it.", param=path, code="missing_field")
        case "value_error":
            reason = str(detail["ctx"]["error"])
            return RequestError(f"{path} {reason}" if path else reason, param=path or None, code="invalid_value")
        case _:
            rule = re.sub(r"^(Input|Value|String|List|Dictionary) should ", "must ", detail["msg"])
            rule = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", rule)  # as JSON calls it
            return RequestError(f"{path or 'body'} = {shown(value)}: {rule}.", param=path or None, code="invalid_value")


BRANCH = re.compile(r"[\[(-]|^(str|int|float|bool|[A-Z]\w*)$")


def _places(loc: Sequence[int | str]) -> list[int | str]:
    """Of a pydantic location, what is a field or an index: the names of a union's branches, types, are not."""
    return [part for part in loc if isinstance(part, int) or not BRANCH.search(part)]


def _path(loc: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in _places(loc)]
    return "".join(parts).removeprefix(".")


def shown(value: object) -> str:
    """A value as it is told back to who sent it: short, and safe in any encoding."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."

"""Errors of the backend and of the text part for clients."""

from __future__ import annotations

import re
from collections.abc import Mapping

from superstep.errors import ConfigError, Fault, SuperstepError
from superstep.http.request_error import RequestError
from superstep.serve.api.backend import BackendAway, BackendBusy


def make_backend_refusal(error: SuperstepError, *, names: Mapping[str, str] | None = None) -> RequestError:
    """The client's error for one of the backend or of the text part.

    Args:
        error: a ``ConfigError`` begins with the name of its field.
        names: this endpoint's names of fields that the engine calls otherwise.
    """
    match error:
        case BackendBusy():
            wait = str(max(1, round(error.retry_after_s)))
            return RequestError(str(error), status=429, code="queue_full", headers={"Retry-After": wait})
        case BackendAway():
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

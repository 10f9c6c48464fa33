"""From the fields of a request to the answers that the engine is asked for."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from superstep.errors import ConfigError
from superstep.http.body_validation import value_or
from superstep.serve.api.app_state import AppState
from superstep.serve.api.backend_errors import make_backend_refusal
from superstep.serve.api.generation import AnswerRequest, choices_of
from superstep.serve.api.openai.fields import NAMES, Common
from superstep.serve.scheduling.request import Sampling


def asks_of(
    fields: Common,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    stop: tuple[str, ...],
    service: AppState,
    *,
    names: Mapping[str, str] | None = None,
) -> list[AnswerRequest]:
    """``n`` answers to each prompt, numbered in the order of the prompts; their seeds do not depend on other prompts.

    Raises:
        RequestError: names the field of this endpoint.
    """
    adapter = service.adapter_of(fields.model)
    asks: list[AnswerRequest] = []
    for prompt in prompts:
        first = AnswerRequest(
            index=len(asks),
            prompt=prompt,
            sampling=sampling,
            stop=stop,
            priority=value_or(fields.priority, 0),
            adapter=adapter,
            salt=value_or(fields.cache_salt, ""),
        )
        try:
            asks += choices_of(first, value_or(fields.n, 1), len(prompts), service)
        except ConfigError as error:
            raise make_backend_refusal(error, names=NAMES | dict(names or {})) from None
    return asks


def head_of(fields: Common, service: AppState, *, prefix: str, kind: str) -> dict[str, Any]:
    """The begin of a response, and of each chunk of a stream. ``prefix``: of its id. ``kind``: its ``object``."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": value_or(fields.model, service.backend.info.name),
        "system_fingerprint": service.backend.info.version,
    }

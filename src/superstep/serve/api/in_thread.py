"""Long work on text, in a thread."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from superstep.errors import ConfigError
from superstep.http.request_error import RequestError
from superstep.serve.api.app_state import AppState
from superstep.serve.api.text_protocol import Json
from superstep.serve.scheduling.request import Constraint

T = TypeVar("T")

ASIDE_CHARS = 1 << 16
"""Texts from this size on are encoded in a thread: the tokenizer takes about 10 ms for them."""


async def aside(work: Callable[[], T], *, param: str) -> T:
    """The result of some work on text, done in a thread.

    Args:
        work: raises ``ConfigError`` where it cannot be done.
        param: the field that it works on; the message may name a place within.

    Raises:
        RequestError: names the field.
    """
    try:
        return await asyncio.to_thread(work)
    except ConfigError as error:
        message = str(error)
        within = re.match(re.escape(param) + r"[\w.\[\]]*(?= )", message)
        if within is None:
            message = f"{param}: {message}"
        raise RequestError(message, param=within[0] if within else param, code="invalid_value") from None


async def encode(text: str, service: AppState) -> tuple[int, ...]:
    """The tokens of a text; raises RequestError where it cannot fit the context."""
    size, most = len(text.encode()), service.most_prompt_bytes
    if size > most:
        raise RequestError(
            f"prompt has {size} bytes; {most} are the most that the context of {service.backend.info.context_tokens} "
            "tokens can hold.",
            param="prompt",
            code="invalid_value",
        )
    if len(text) < ASIDE_CHARS:
        return tuple(service.words.encode(text))
    return tuple(await asyncio.to_thread(service.words.encode, text))


async def encode_chat(messages: Sequence[Json], tools: Sequence[Json], service: AppState) -> tuple[int, ...]:
    """The tokens of a conversation. Templates are programs, on input that a client chooses."""
    return tuple(await aside(lambda: service.words.chat(messages, tools, service.most_prompt_bytes), param="messages"))


async def check_constraint(constraint: Constraint | None, service: AppState, *, param: str) -> None:
    """Refuse an impossible form before the engine receives it. ``param``: the field that it came from."""
    if constraint is not None:
        await aside(lambda: service.words.check_constraint(constraint), param=param)

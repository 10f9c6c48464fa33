"""Limits of a request: bytes, time and depth of a body, and places in the queue."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from superstep.http.request_error import RequestError

ASIDE_BYTES = 1 << 20
"""Larger bodies are parsed in a thread: 1 MiB of JSON takes about 10 ms, which would block all other requests."""

CLOSE = {"Connection": "close"}
"""For a refusal while the body is still arriving: the rest is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Limits of a request's body.

    Attributes:
        stall_s: the longest silence within a body.
        body_s: the longest time for a whole body.
        json_depth: nesting of lists and objects.
        json_values: values in a body: each takes up to a hundred bytes of memory, however short its text.
    """

    body_bytes: int = 32 << 20
    stall_s: float = 20.0
    body_s: float = 300.0
    json_depth: int = 64
    json_values: int = 2_000_000


async def read_json(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """The JSON object in a request's body. Raises RequestError: 413, 408, or 400 with the field that cannot be read."""
    body = await read_body(request, limits)
    if len(body) < ASIDE_BYTES:
        return parse(body, limits)
    return await asyncio.to_thread(parse, body, limits)


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The body; refused as soon as it is too large or too slow, or where it is compressed."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("compressed bodies are not read here; send them as they are.", status=415)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.body_bytes:
        raise _too_large(limits)
    chunks, size = request.stream(), 0
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                part = await asyncio.wait_for(anext(chunks, None), limits.stall_s)
                if part is None:
                    return b"".join(parts)
                size += len(part)
                if size > limits.body_bytes:
                    raise _too_large(limits)
                parts.append(part)
    except TimeoutError:
        raise RequestError(
            f"body stalled after {size} bytes; send it within {limits.body_s:g} s, with no silence over "
            f"{limits.stall_s:g} s.",
            status=408,
            code="body_stalled",
            headers=CLOSE,
        ) from None
    except ClientDisconnect:
        raise RequestError("body ended early; the client went away.", code="body_cut", headers=CLOSE) from None


def _too_large(limits: BodyLimits) -> RequestError:
    return RequestError(
        f"body is over the limit of {limits.body_bytes} bytes; send less.",
        status=413,
        code="body_too_large",
        headers=CLOSE,
    )


def parse(body: bytes, limits: BodyLimits) -> dict[str, Any]:
    """Parse a JSON object; the error names the field.

    msgspec is much faster and takes neither NaN nor lone surrogates. Python's parser takes both, so it finds their
    field.
    """
    if separators(body) > limits.json_values and separators(re.sub(rb'"(?:[^"\\]|\\.)*"', b'""', body)) > (
        limits.json_values
    ):
        raise RequestError(
            f"body has more than {limits.json_values} values; send fewer at a time.", code="body_too_large"
        )
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(limits) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = _read_slowly(body, limits)
    if not isinstance(value, dict):
        raise RequestError("body is no JSON object; send one, such as {}.", code="invalid_json")
    _check_depth(value, limits)
    return value


def separators(body: bytes) -> int:
    """At least the number of values, if no string contains a separator."""
    return sum(body.count(mark) for mark in (b",", b"[", b"{"))


def _read_slowly(body: bytes, limits: BodyLimits) -> object:
    """Parse again to name the field where msgspec gave up."""
    try:
        value = json.loads(body)
    except RecursionError:
        raise _too_deep(limits) from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"body is no UTF-8 at byte {error.start}; send JSON in UTF-8.", code="invalid_json"
        ) from None
    except ValueError as error:
        reason = re.split(r"[\n;]", str(error))[0]  # behind it Python says which of its own settings would let it pass
        raise RequestError(f"body is no JSON ({reason}); send one object.", code="invalid_json") from None
    _check_values(value, "", limits.json_depth)
    raise RequestError("body is no JSON that can be read; send one object.", code="invalid_json")


def _check_values(value: object, path: str, depth: int) -> None:
    """Refuse, by its path, a value that JSON does not have: a lone surrogate, NaN."""
    name = path or "body"
    match value:
        case str() if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise RequestError(
                f"{name} holds half of a surrogate pair, which is no character; send whole ones.",
                param=name,
                code="invalid_value",
            )
        case float() if not math.isfinite(value):
            raise RequestError(f"{name} = {value} must be a finite number.", param=name, code="invalid_value")
        case dict() if depth:
            for key, inner in value.items():
                _check_values(key, f"{path}.<a key>".removeprefix("."), depth - 1)
                _check_values(inner, f"{path}.{key}".removeprefix("."), depth - 1)
        case list() if depth:
            for place, inner in enumerate(value):
                _check_values(inner, f"{name}[{place}]", depth - 1)


def _check_depth(body: object, limits: BodyLimits) -> None:
    layer = [body]
    for _ in range(limits.json_depth + 1):
        if not layer:
            return
        inner: list[object] = []
        for value in layer:
            match value:
                case dict():
                    inner += [one for one in value.values() if isinstance(one, dict | list)]
                case list():
                    inner += [one for one in value if isinstance(one, dict | list)]
        layer = inner
    raise _too_deep(limits)


def _too_deep(limits: BodyLimits) -> RequestError:
    return RequestError(f"body nests deeper than {limits.json_depth}; send something flatter.", code="body_too_deep")


class Queue:
    """Places for answers; a request without one is told when to come again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self.mean_s = 1.0

    @contextmanager
    def place(self, count: int) -> Iterator[None]:
        """Take places for some answers, and give them back at the end. Raises RequestError: 429 with Retry-After where
        all are taken; 400 where there are fewer places in all.
        """
        if count > self.size:
            raise RequestError(
                f"n asks for {count} answers, and the queue holds {self.size}; ask for fewer.", param="n"
            )
        if self.taken + count > self.size:
            raise RequestError(
                f"the queue is full: {self.taken} of {self.size} answers are under way; ask again.",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(min(60, max(1, math.ceil(self.mean_s))))},
            )
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    def note(self, seconds: float) -> None:
        """Note the seconds of an answer, for the mean that Retry-After reports."""
        self.mean_s += (seconds - self.mean_s) / 16

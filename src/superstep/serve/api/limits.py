"""Limits of a request for answers beside its body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superstep.http.limits import BodyLimits
from superstep.http.request_error import RequestError, show


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(BodyLimits):
    """Limits of one client, and of all clients together.

    Attributes:
        choices: answers of one request: prompts times ``n``.
        queue: answers that are computed or wait, of all clients.
        stops: stop texts of one request.
        stop_chars: characters of each.
        logit_biases: tokens of one request with a bias.
    """

    choices: int = 512
    queue: int = 1024
    stops: int = 16
    stop_chars: int = 1000
    logit_biases: int = 4096


def biases_of(biases: Mapping[str, float], most: int, *, param: str = "logit_bias") -> tuple[tuple[int, float], ...]:
    """The biases of tokens' logits; JSON spells token ids as text.

    Raises:
        RequestError: there are too many, or a key is no token id.
    """
    if len(biases) > most:
        raise RequestError(f"{param} has {len(biases)} tokens; give at most {most}.", param=param)
    for token in biases:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise RequestError(f"{param} has the key {show(token)}; its keys are token ids.", param=param)
    return tuple((int(token), bias) for token, bias in biases.items())

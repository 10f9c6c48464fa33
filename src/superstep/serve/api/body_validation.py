"""Bodies as values: strict types, no field that is not known.

Types are strict: ``"0.5"`` is no number and ``true`` no 1. ``null`` is what a field has that was not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from superstep.serve.api.http_errors import RequestError, refused_by_model, shown

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """Takes no field that it does not know, and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def read_model(form: type[M], body: Mapping[str, Any]) -> M:
    """A body as its endpoint's fields.

    Raises:
        Refused: naming the field and the rule.
    """
    try:
        return form.model_validate(body)
    except ValidationError as error:
        known = {field.alias or name for name, field in form.model_fields.items()}
        raise refused_by_model(error, known) from None


def given(value: T | None, default: T) -> T:
    """The value, where there is one."""
    return default if value is None else value


def biases_of(biases: Mapping[str, float], most: int, *, param: str = "logit_bias") -> tuple[tuple[int, float], ...]:
    """What is added to the logits of tokens, whose ids JSON spells as text.

    Raises:
        Refused: there are too many, or a key is no token id.
    """
    if len(biases) > most:
        raise RequestError(f"{param} has {len(biases)} tokens; give at most {most}.", param=param)
    for token in biases:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise RequestError(f"{param} has the key {shown(token)}; its keys are token ids.", param=param)
    return tuple((int(token), bias) for token, bias in biases.items())

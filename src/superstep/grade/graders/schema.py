"""Answers that are JSON, of a form that a schema says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from superstep.errors import ConfigError
from superstep.grade.graders.check import Tools
from superstep.grade.graders.final_answer import last_fence
from superstep.grade.graders.literals import decode, same
from superstep.grade.sandbox.child import plain
from superstep.grade.verdict import Verdict, ok, wrong

MOST_CHARS = 1 << 20
ANY = object()
"""Any value that the schema takes."""


@dataclass(frozen=True, slots=True)
class Json:
    """The answer is one JSON value and nothing else, or the last fenced block is.

    Attributes:
        answer: the model's.
        schema: a JSON Schema (2020-12) that the value must keep.
        expected: the value itself; where none is given, each one that keeps the schema is right.
    """

    answer: str
    schema: Mapping[str, Any]
    expected: object = ANY

    def verdict(self, tools: Tools) -> Verdict:
        """See ``Check``."""
        keeper = _keeper(self.schema)
        try:
            value = strict(last_fence(self.answer))
            broken = next(keeper.iter_errors(value), None)
        except (ValueError, RecursionError) as error:
            return wrong(f"no JSON: {error}")
        if broken is not None:
            return wrong(f"at {broken.json_path}: {broken.message}")
        if self.expected is not ANY and not same(self.expected, decode(plain(value))):
            return wrong("the form is right, the value another")
        return ok()


def _keeper(schema: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of a package that need not be there
    """What holds a value against a schema."""
    try:
        import jsonschema
    except ModuleNotFoundError:
        raise ConfigError("jsonschema is not installed, which keeps forms: pip install 'superstep[grade]'.") from None
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def strict(text: str) -> Any:  # noqa: ANN401 - any data
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or has NaN, or an object names a key twice, which readers take in two ways.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"longer than {MOST_CHARS} characters")
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    pairs_by_key = dict(pairs)
    if len(pairs_by_key) != len(pairs):
        raise ValueError("a key is named twice")
    return pairs_by_key

"""Grades JSON answers by a schema."""

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
"""Any value that the schema accepts."""


@dataclass(frozen=True, slots=True)
class Json:
    """The answer, or its last fenced block, is one JSON value and nothing else.

    Attributes:
        schema: a JSON Schema (2020-12).
        expected: the value itself; without it every value that fits the schema is right.
    """

    answer: str
    schema: Mapping[str, Any]
    expected: object = ANY

    def verdict(self, tools: Tools) -> Verdict:
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
    """The schema's validator."""
    try:
        import jsonschema
    except ModuleNotFoundError:
        raise ConfigError("jsonschema is not installed, which keeps forms: pip install 'superstep[grade]'.") from None
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def strict(text: str) -> Any:  # noqa: ANN401 - any data
    """Parse JSON strictly. Raises ValueError where the text is not JSON, has NaN, or an object has a key twice, which
    parsers read in different ways.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"longer than {MOST_CHARS} characters")
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    pairs_by_key = dict(pairs)
    if len(pairs_by_key) != len(pairs):
        raise ValueError("a key is named twice")
    return pairs_by_key

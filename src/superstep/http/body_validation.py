"""Request bodies as values: strict types, no unknown fields.

Types are strict: ``"0.5"`` is not a number and ``true`` is not 1. ``null`` means that the field was not given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails

from superstep.errors import did_you_mean
from superstep.http.request_error import RequestError, show

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class StrictBody(BaseModel):
    """A body without unknown fields and without values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def takes(options: type, *, or_null: bool = False) -> Callable[[type[M]], type[M]]:
    """A class decorator: the form has each field of a dataclass besides, but for those that it declares itself.

    Args:
        options: the dataclass, whose defaults are the form's.
        or_null: whether a field may be ``null``, which then is its default.
    """
    hints = get_type_hints(options)
    added: dict[str, Any] = {
        each.name: (hints[each.name] | None, None) if or_null else (hints[each.name], each.default)
        for each in fields(options)
    }

    def extend(form: type[M]) -> type[M]:
        new = {name: field for name, field in added.items() if name not in form.model_fields}
        return create_model(form.__name__, __base__=form, __doc__=form.__doc__, __module__=form.__module__, **new)

    return extend


def read_model(form: type[M], body: Mapping[str, Any]) -> M:
    """Read a body as its endpoint's fields. Raises RequestError: names the field and the rule."""
    try:
        return form.model_validate(body)
    except ValidationError as error:
        known = {field.alias or name for name, field in form.model_fields.items()}
        raise make_body_refusal(error, known) from None


def value_or(value: T | None, default: T) -> T:
    return default if value is None else value


def make_body_refusal(error: ValidationError, known: Iterable[str]) -> RequestError:
    """The error for a body that does not fit its endpoint: its first mistake. ``known``: the fields of the body, to
    suggest the right name for an unknown one.
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
            return RequestError(f"{path or 'body'} = {show(value)}: {rule}.", param=path or None, code="invalid_value")


BRANCH = re.compile(r"[\[(-]|^(str|int|float|bool|[A-Z]\w*)$")


def _places(loc: Sequence[int | str]) -> list[int | str]:
    """Fields and indices of a pydantic location, without the names of a union's branches."""
    return [part for part in loc if isinstance(part, int) or not BRANCH.search(part)]


def _path(loc: Sequence[int | str]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in _places(loc)]
    return "".join(parts).removeprefix(".")

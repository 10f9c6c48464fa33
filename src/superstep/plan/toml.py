"""RunConfig from TOML and back. Unknown keys and wrong types are errors that name the field."""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from superstep.errors import ConfigError, did_you_mean
from superstep.plan.config import RunConfig

T = TypeVar("T")


def read_config(path: Path) -> RunConfig:
    """The run that a TOML file describes; what it leaves out keeps the default.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has an unknown key or a value of the wrong type.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error
    return _build(RunConfig, raw, "")


def _build(cls: type[T], raw: Mapping[str, Any], prefix: str) -> T:
    hints = typing.get_type_hints(cls)
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if key not in known:
            raise ConfigError(f"unknown key '{name}'{did_you_mean(key, known)}")
        hint = hints[key]
        if is_dataclass(hint):
            if not isinstance(value, dict):
                raise ConfigError(f"{name} = {value!r} must be a table: write [{name}].")
            values[key] = _build(hint, value, f"{name}.")  # type: ignore[arg-type]
        else:
            values[key] = _convert(name, value, hint)
    return cls(**values)


def _convert(name: str, value: object, hint: object) -> object:
    for option in alternatives(hint):
        origin = typing.get_origin(option)
        if origin is Literal:
            if value in typing.get_args(option):
                return value
        elif (entry := table_entry(option)) is not None:
            if isinstance(value, dict):
                return tuple(sorted((key, _convert(f"{name}.{key}", word, entry)) for key, word in value.items()))
        elif origin is tuple:
            item_type = typing.get_args(option)[0]
            if type(value) is item_type:
                return (value,)
            if isinstance(value, list) and all(type(item) is item_type for item in value):
                return tuple(value)
        elif option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif option is not type(None) and type(value) is option:
            return value
    raise ConfigError(f"{name} = {value!r} is not valid; it must be {describe_type(hint)}.")


def alternatives(hint: object) -> tuple[Any, ...]:
    """The types of which a field's value has one."""
    # `Literal[...] | None` is a typing.Union, `int | None` a types.UnionType.
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def table_entry(hint: object) -> object | None:
    """What the values of a table must be; None where the field is no table.

    A table is a tuple of pairs, sorted by key, so that equal tables are equal values.
    """
    if typing.get_origin(hint) is not tuple or typing.get_origin(pair := typing.get_args(hint)[0]) is not tuple:
        return None
    entry: object = typing.get_args(pair)[1]
    return entry


def describe_type(hint: object) -> str:
    """What a field's value must be, for a person; that it may be left out goes without saying."""
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    parts = []
    for option in alternatives(hint):
        if typing.get_origin(option) is Literal:
            parts.append("one of " + ", ".join(repr(choice) for choice in typing.get_args(option)))
        elif (entry := table_entry(option)) is not None:
            parts.append(f"a table, each of its values {describe_type(entry)}")
        elif typing.get_origin(option) is tuple:
            parts.append({str: "a list of strings", int: "a list of whole numbers"}[typing.get_args(option)[0]])
        elif option is not type(None):
            parts.append(words[option])
    return " or ".join(parts)


def write_config(config: RunConfig) -> str:
    """The TOML text that ``read_config`` reads back as an equal value; None and empty tables are left out."""
    lines: list[str] = []
    for section in fields(config):
        value = getattr(config, section.name)
        hints = typing.get_type_hints(type(value))
        held = {name: getattr(value, name) for name in hints}
        lines += [f"[{section.name}]"]
        lines += [
            f"{name} = {_literal(content)}"
            for name, content in held.items()
            if content is not None and (content or table_entry(hints[name]) is None)
        ]
        lines.append("")
    return "\n".join(lines)


def _literal(value: Any) -> str:  # noqa: ANN401
    match value:
        case bool():
            return "true" if value else "false"
        case ((_, _), *_):
            return "{" + ", ".join(f"{_key(key)} = {_literal(word)}" for key, word in value) + "}"
        case tuple():
            return "[" + ", ".join(_literal(item) for item in value) + "]"
        case str():
            # A TOML basic string escapes as JSON does, DEL excepted.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case float():
            text = repr(value)
            return text if any(mark in text for mark in ".einf") else text + ".0"
        case _:
            return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _literal(name)

"""Frozen dataclasses from TOML and back, RunConfig first. Unknown keys and wrong types are errors with the field."""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from superstep.errors import ConfigError, did_you_mean
from superstep.plan.config import RunConfig

T = TypeVar("T")


def read_config(path: Path) -> RunConfig:
    """The run that a TOML file describes; fields left out keep their defaults. Raises ConfigError where the file cannot
    be read, is not TOML, or has an unknown key or a value of the wrong type.
    """
    return build(RunConfig, read_tables(path))


def parse_config(text: str) -> RunConfig:
    """Read what ``write_config`` wrote."""
    return build(RunConfig, tomllib.loads(text))


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; raises ConfigError where it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error


def build(cls: type[T], raw: Mapping[str, Any], prefix: str = "", base: T | None = None) -> T:
    """A dataclass from a table; fields left out come from ``base``, if given, or their defaults.

    Args:
        prefix: of the keys' names in errors, such as ``"chip."``.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or no value for a field without a default.
    """
    hints = typing.get_type_hints(cls)
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if key not in known:
            raise ConfigError(f"unknown key '{name}'{did_you_mean(key, known)}")
        hint = hints[key]
        section = section_of(hint)
        if section is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"{name} = {value!r} must be a table: write [{name}].")
            values[key] = build(section, value, f"{name}.")
        else:
            values[key] = _convert(name, value, hint)
    if base is not None:
        return replace(base, **values)  # type: ignore[type-var]
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{prefix}{field.name} is missing; it must be {describe_type(hints[field.name])}.")
    return cls(**values)


def _convert(name: str, value: object, hint: object) -> object:
    for option in alternatives(hint):
        origin = typing.get_origin(option)
        if origin is Literal:
            if value in typing.get_args(option):
                return value
        elif table_entry(option) is not None:
            if isinstance(value, dict):
                return _pairs(name, value, option)
        elif origin is tuple:
            if (items := _as_list(name, value, option)) is not None:
                return items
        elif option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif option is not type(None) and type(value) is option:
            return value
    raise ConfigError(f"{name} = {value!r} is not valid; it must be {describe_type(hint)}.")


def _as_list(name: str, value: object, hint: object) -> tuple[object, ...] | None:
    """A list as a tuple, one value as a list of it; None for anything else."""
    item = typing.get_args(hint)[0]
    if choices := _choices(hint):
        words = value if isinstance(value, list) else [value]
        return tuple(words) if all(word in choices for word in words) else None
    if type(value) is item:
        return (value,)
    if isinstance(value, list) and all(type(each) is (dict if is_dataclass(item) else item) for each in value):
        return _items(name, value, item)
    return None


def _choices(hint: object) -> tuple[object, ...]:
    """The words that a list may hold; empty for every other field."""
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    return typing.get_args(item) if typing.get_origin(item) is Literal else ()


def _pairs(name: str, raw: Mapping[str, Any], hint: object) -> tuple[tuple[object, object], ...]:
    """A table as pairs: sorted, so that equal tables are equal values, but in file order where its keys are fixed."""
    key_hint, entry = typing.get_args(typing.get_args(hint)[0])
    pairs = [(_convert(f"a key of {name}", key, key_hint), _convert(f"{name}.{key}", raw[key], entry)) for key in raw]
    return tuple(pairs if typing.get_origin(key_hint) is Literal else sorted(pairs))


def _items(name: str, raw: list[Any], item: type) -> tuple[object, ...]:
    return tuple(build(item, each, f"{name}[{k}].") for k, each in enumerate(raw)) if is_dataclass(item) else tuple(raw)


def alternatives(hint: object) -> tuple[Any, ...]:
    """The types that a field's value may have."""
    # `Literal[...] | None` is a typing.Union, `int | None` a types.UnionType.
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def section_of(hint: object) -> type[Any] | None:
    """The dataclass of a field that is a table of its own, optional or not; None for other fields."""
    first: object = alternatives(hint)[0]
    return first if isinstance(first, type) and is_dataclass(first) else None


def table_entry(hint: object) -> object | None:
    """The type of a table's values; None where the field is no table. A table is a tuple of pairs."""
    if typing.get_origin(hint) is not tuple or typing.get_origin(pair := typing.get_args(hint)[0]) is not tuple:
        return None
    entry: object = typing.get_args(pair)[1]
    return entry


def describe_type(hint: object) -> str:
    """A field's type for readers; that it may be left out is not said."""
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    parts = []
    for option in alternatives(hint):
        if typing.get_origin(option) is Literal:
            parts.append("one of " + ", ".join(repr(choice) for choice in typing.get_args(option)))
        elif (entry := table_entry(option)) is not None:
            parts.append(f"a table, each of its values {describe_type(entry)}")
        elif choices := _choices(option):
            parts.append("a list of any of " + ", ".join(map(repr, choices)))
        elif typing.get_origin(option) is tuple:
            names = {str: "a list of strings", int: "a list of whole numbers"}
            parts.append(names.get(typing.get_args(option)[0], "a list of tables"))
        elif option is not type(None):
            parts.append(words[option])
    return " or ".join(parts)


def write_config(config: RunConfig) -> str:
    """The TOML text that ``read_config`` reads back as an equal value; None and empty tables are left out."""
    lines: list[str] = []
    for section in fields(config):
        value = getattr(config, section.name)
        if value is not None:
            lines += [f"[{section.name}]", *write_fields(value), ""]
    return "\n".join(lines)


def write_fields(value: object) -> list[str]:
    """A line of TOML for each field that is neither None, nor an empty table, nor a dataclass."""
    hints = typing.get_type_hints(type(value))
    held = {name: getattr(value, name) for name in hints}
    return [
        f"{name} = {literal(content)}"
        for name, content in held.items()
        if content is not None and not is_dataclass(content) and (content != () or not _is_of_tables(hints[name]))
    ]


def _is_of_tables(hint: object) -> bool:
    return table_entry(hint) is not None or any(is_dataclass(item) for item in typing.get_args(hint))


def literal(value: Any) -> str:  # noqa: ANN401
    """A value in TOML."""
    if is_dataclass(value):
        return "{" + ", ".join(write_fields(value)) + "}"
    match value:
        case bool():
            return "true" if value else "false"
        case ((_, _), *_):
            return "{" + ", ".join(f"{_key(key)} = {literal(word)}" for key, word in value) + "}"
        case (first, *_) if is_dataclass(first):
            return "[\n" + "".join(f"    {literal(item)},\n" for item in value) + "]"
        case tuple():
            return "[" + ", ".join(literal(item) for item in value) + "]"
        case str():
            # A TOML basic string escapes as JSON does, DEL excepted.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case float():
            short = f"{value:g}"
            text = short if float(short) == value else repr(value)
            return text if any(mark in text for mark in ".einf") else text + ".0"
        case _:
            return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else literal(name)

"""Chat messages in the form that chat templates read.

Text in parts is joined, the arguments of tool calls become objects, null fields are left out. Content that a template
could not show is refused, never dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from superstep.errors import ConfigError, did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")

FIELDS = {
    "system": ("role", "content", "name"),
    "developer": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "tool_calls", "reasoning_content", "reasoning"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
"""Fields of a message, by role."""

WITHOUT_EFFECT = ("annotations", "audio", "function_call", "refusal")
"""Fields that OpenAI's client returns with an answer; empty ones are ignored."""

MOST_DEPTH = 64
"""Nesting of objects; templates and JSON readers are recursive."""


def plain_messages(messages: Sequence[Mapping[str, Any]], parts: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Convert messages for a template.

    Args:
        messages: as in OpenAI's API.
        parts: sorts of parts that stay, in content that has any.

    Raises:
        ConfigError: the message names the field, its value, the rule and what would work.
    """
    if not messages:
        raise ConfigError("messages is empty; give at least one message.")
    return [_plain(message, f"messages[{k}]", parts) for k, message in enumerate(messages)]


def check_value(value: object, where: str, depth: int = 0) -> None:
    """Check that a value is JSON, not nested too deep, and without lone surrogates.

    Raises:
        ConfigError: the message names the place.
    """
    if depth > MOST_DEPTH:
        raise ConfigError(f"{where} is nested deeper than {MOST_DEPTH} levels; flatten it.")
    if isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise ConfigError(f"{where} holds half of a surrogate pair, which is no character; send valid Unicode.")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where} has the key {key!r}; keys are texts.")
            check_value(key, where, depth + 1)
            check_value(inner, f"{where}.{key}", depth + 1)
    elif isinstance(value, Sequence):
        for k, inner in enumerate(value):
            check_value(inner, f"{where}[{k}]", depth + 1)
    elif value is not None and not isinstance(value, bool | int | float):
        raise ConfigError(f"{where} is of type {type(value).__name__}; give text, numbers, lists and objects.")


def _plain(message: Mapping[str, Any], where: str, parts: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} is of type {type(message).__name__}; give an object with role and content.")
    role = message.get("role")
    if role not in ROLES:
        raise ConfigError(f"{where}.role = {_short(role)} is no role{did_you_mean(str(role)[:40], ROLES)}")
    fields = {field: value for field, value in message.items() if value is not None}
    for field in fields:
        if field in WITHOUT_EFFECT and not fields[field]:
            continue
        if field not in FIELDS[role]:
            raise ConfigError(
                f"{where}.{field} is no field of a message of role {role}{did_you_mean(field[:40], FIELDS[role])}"
            )
    check_value(fields, where)
    plain = {field: value for field, value in fields.items() if field not in WITHOUT_EFFECT}
    if not _has_parts(fields.get("content"), parts):
        plain["content"] = _text(fields.get("content"), f"{where}.content", is_needed=not fields.get("tool_calls"))
    if role == "assistant":
        _plain_assistant(plain, where)
    for field in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(plain.get(field, ""), str):
            raise ConfigError(f"{where}.{field} = {_short(plain[field])} must be text.")
    return plain


def _plain_assistant(plain: dict[str, Any], where: str) -> None:
    calls = plain.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise ConfigError(f"{where}.tool_calls is of type {type(calls).__name__}; give a list.")
        plain["tool_calls"] = [_plain_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls)]
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain.pop("reasoning"))


def _has_parts(content: object, parts: tuple[str, ...]) -> bool:
    """Whether content is a list of parts, of which some are no text and all of a sort that stays."""
    kinds = (
        {part.get("type") for part in content if isinstance(part, Mapping)} if isinstance(content, list) else {"text"}
    )
    return not kinds <= {"text"} and kinds <= {"text", *parts}


def _text(content: object, where: str, *, is_needed: bool) -> str:
    """One text, from a text or from parts; parts are joined by newlines, as other servers do."""
    if content is None and not is_needed:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{where} = {_short(content)} must be text or a list of text parts.")
    for k, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(
                f"{where}[{k}] has type {_short(kind)}; this server reads text parts: {{'type': 'text', 'text': ...}}."
            )
    return "\n".join(part["text"] for part in content)


def _plain_call(call: object, where: str) -> dict[str, Any]:
    """An earlier tool call, with its arguments as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{where} is no call; give {{'id': ..., 'type': 'function', 'function': {{'name', 'arguments'}}}}."
        )
    if call.get("type", "function") != "function":
        raise ConfigError(f"{where}.type = {_short(call['type'])} must be 'function'.")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    plain = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **plain} if isinstance(call.get("id"), str) else plain


def _short(value: object) -> str:
    """A value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _arguments(raw: object, where: str) -> dict[str, Any]:
    arguments = raw
    if isinstance(raw, str):
        try:
            arguments = json.loads(raw or "{}")
        except (ValueError, RecursionError):
            raise ConfigError(f"{where} = {_short(raw)} is no JSON; give an object as JSON text.") from None
        check_value(arguments, where)
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{where} is of type {type(arguments).__name__}; give an object as JSON text.")
    return dict(arguments)

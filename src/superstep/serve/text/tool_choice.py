"""The tools of a request, and the grammar that ``tool_choice`` requires."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from superstep.data.tokenizer import Tokenizer
from superstep.errors import ConfigError, did_you_mean
from superstep.serve.scheduling.request import Constraint
from superstep.serve.text.chat_messages import check_value
from superstep.serve.text.tool_call_parser import CLOSER, OPENERS, Form

MOST_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON in Python's format, in which models saw calls in training."""


def check_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Check the offered tools; their names.

    Raises:
        ConfigError: the message names the field, its value, the rule and what would work.
    """
    if len(tools) > MOST_TOOLS:
        raise ConfigError(f"tools has {len(tools)} entries; give at most {MOST_TOOLS}.")
    check_value(tools, "tools")
    names = [_name(tool, f"tools[{k}]") for k, tool in enumerate(tools)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"tools has {name!r} {names.count(name)} times; give each tool a name of its own.")
    return tuple(names)


def tool_constraint(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    form: Form | None,
    tokenizer: Tokenizer,
    *,
    is_parallel: bool = True,
) -> Constraint | None:
    """The grammar of the answer; None where it may be text.

    Args:
        tools: that are offered.
        choice: ``none``, ``auto``, ``required``, or ``{"type": "function", "function": {"name": ...}}``.
        form: of the model's calls, which ``CallParser`` reads.
        tokenizer: of the model: marks of a call may be single tokens.
        is_parallel: whether several calls may be made where any tool may be called.

    Raises:
        ConfigError: the tools or the choice are invalid.
    """
    names = check_tools(tools)
    if choice in ("none", "auto"):
        return None
    if choice == "required":
        wanted = names
    elif isinstance(choice, Mapping):
        wanted = (_chosen_name(choice, names),)
    else:
        raise ConfigError(f"tool_choice = {choice!r} must be none, auto, required, or an object that names a function.")
    if not wanted:
        raise ConfigError("tool_choice = 'required' needs tools; give at least one.")
    if form is None:
        raise ConfigError(
            "tool_choice asks for a call, and this model's chat template shows no form of calls that is known; "
            "use tool_choice 'auto' or 'none'."
        )
    chosen = [tool["function"] for tool in tools if tool["function"]["name"] in wanted]
    return Constraint(kind="lark", text=_lark(chosen, form, tokenizer, is_many=is_parallel and choice == "required"))


def _name(tool: Mapping[str, Any], where: str) -> str:
    if tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise ConfigError(f"{where} is no function; give {{'type': 'function', 'function': {{'name': ...}}}}.")
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{where}.function.name = {str(name)[:80]!r} must be 1 to 64 letters, digits or any of . _ -."
        )
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise ConfigError(f"{where}.function.parameters must be a JSON schema, an object.")
    return name


def _chosen_name(choice: Mapping[str, Any], names: Sequence[str]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise ConfigError("tool_choice names no function; give {'type': 'function', 'function': {'name': ...}}.")
    if name not in names:
        raise ConfigError(f"tool_choice names {name[:80]!r}, which is no tool here{did_you_mean(name[:80], names)}")
    return name


def _lark(functions: Sequence[Mapping[str, Any]], form: Form, tokenizer: Tokenizer, *, is_many: bool) -> str:
    """The grammar of one call, or of one or more, of some functions."""
    schema = _call_schema(functions, "parameters" if form == "llama" else "arguments")
    opener = _mark(OPENERS[form], tokenizer)
    match form:
        case "hermes":
            start = 'call ("\\n" call)*' if is_many else "call"
            rules = [f"start: {start}", f'call: {opener} "\\n" body "\\n" {_mark(CLOSER, tokenizer)}']
        case "llama":
            rules = ["start: " + ('body ("; " body)*' if is_many else "body")]
        case "mistral":
            rules = [f"start: {opener} body"]
            many = {} if is_many else {"maxItems": 1}
            defs = schema.pop("$defs")
            schema = {"type": "array", "items": schema, "minItems": 1, **many, "$defs": defs}
    return "\n".join([*rules, "body: %json " + json.dumps({**schema, "x-guidance": SPACING})])


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """A mark of calls in a grammar: its token if it has one, as that does not match its characters; else the
    characters.
    """
    for token, added in tokenizer.core.get_added_tokens_decoder().items():
        if added.content == text:
            return f"<[{token}]>"
    return json.dumps(text)


def _call_schema(functions: Sequence[Mapping[str, Any]], field: str) -> dict[str, Any]:
    """The schema of a call of some functions, with their parameters under ``$defs``."""
    defs = {}
    calls = []
    for k, function in enumerate(functions):
        defs[f"tool{k}"] = _move_references(function.get("parameters") or {"type": "object"}, f"#/$defs/tool{k}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, field: {"$ref": f"#/$defs/tool{k}"}},
                "required": ["name", field],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": defs}


def _move_references(schema: Any, root: str) -> Any:  # noqa: ANN401 - any JSON
    """A schema with its references moved to ``root``."""
    if isinstance(schema, Mapping):
        return {key: _move_reference(key, value, root) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_move_references(inner, root) for inner in schema]
    return schema


def _move_reference(key: str, value: Any, root: str) -> Any:  # noqa: ANN401
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return root + value[1:]
    return _move_references(value, root)

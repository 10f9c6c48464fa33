"""Tool calls in a model's answer, parsed from its text as it arrives.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Hermes, Qwen
    llama     {"name": ..., "parameters": {...}} at the start of a line     Llama 3, after <|python_tag|> or not
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]          Mistral

A call is reported when it is complete: only then it is certain. Everything else stays text, without the white space
next to calls. A call of a tool that was not offered stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from superstep.serve.text.partial_json import JsonScan

Form = Literal["hermes", "llama", "mistral"]

OPENERS: dict[Form, str] = {"hermes": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
CLOSER = "</tool_call>"
SPACE = frozenset(" \t\r\n")

BEGIN = re.compile(r'\s*(\[\s*)?\{\s*"(name|arguments|parameters|type|id)"\s*:')
"""The start of a call's JSON; an answer in other JSON need not wait for its end."""

MOST_CALL = 262_144
"""Characters of a call; longer ones are text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool to be called.

    Attributes:
        name: of the tool.
        arguments: an object as JSON text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """New content of an answer.

    Attributes:
        text: of the answer itself; may be empty.
        calls: that became complete, in order.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


def form_of(template: str) -> Form | None:
    """The format of a model's tool calls, by its chat template; None for an unknown one."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama"
    return None


class CallParser:
    """Parses one answer. The result does not depend on where its text is cut.

    Args:
        form: of the model's calls.
        names: of the tools that were offered.
    """

    def __init__(self, form: Form, names: Iterable[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._opener = OPENERS[form]
        self._state: Literal["text", "body", "close"] = "text"
        self._held: list[str] = []
        """What may be part of a call: white space, an opener that began, a call that goes on."""
        self._opened = 0
        """Where in it the opener is."""
        self._begun = 0
        """Characters of the opener, or of the closer, that were seen."""
        self._scan = JsonScan()
        self._body: list[str] = []
        self._has_key = False
        self._calls: tuple[ToolCall, ...] = ()
        self._is_line_start = True
        self._is_after_call = False
        self._out: list[str] = []
        self._done: list[ToolCall] = []

    def push(self, text: str) -> Delta:
        """New certain content."""
        for char in text:
            self._see(char)
        return self._flush()

    def end(self) -> Delta:
        """The remaining content after the last text. A call without only its closing mark counts."""
        if self._state == "close":
            self._take()
        self._release()
        return self._flush()

    def _flush(self) -> Delta:
        delta = Delta("".join(self._out), tuple(self._done))
        self._out, self._done = [], []
        return delta

    def _see(self, char: str) -> None:
        match self._state:
            case "text":
                self._see_text(char)
            case "body":
                self._see_body(char)
            case "close":
                self._see_close(char)

    def _see_text(self, char: str) -> None:
        if self._begun:
            if self._opener[self._begun] == char:
                self._held.append(char)
                self._begun += 1
                if self._begun == len(self._opener):
                    self._enter()
                return
            self._release()
        if char == self._opener[0]:
            self._opened = len(self._held)
            self._held.append(char)
            self._begun = 1
        elif self._form == "llama" and char == "{" and self._is_line_start:
            self._enter()
            self._see_body(char)
        elif char in SPACE or (char == ";" and self._form == "llama" and self._is_after_call):
            self._held.append(char)
            self._is_line_start = self._is_line_start or char == "\n"
        else:
            self._release()
            self._put(char)

    def _see_body(self, char: str) -> None:
        if not self._body and char in SPACE:
            self._held.append(char)
            return
        state = "broken"
        if self._body or char == ("[" if self._form == "mistral" else "{"):
            state = self._scan.see(char)
        if char == ":" and not self._has_key:
            self._has_key = True
            state = state if BEGIN.match("".join(self._body) + char) else "broken"
        if state == "broken" or len(self._body) == MOST_CALL:
            self._give_up()
            self._see(char)
            return
        self._held.append(char)
        self._body.append(char)
        if state == "end":
            self._end_body()

    def _give_up(self) -> None:
        """Treat the held text as text; a call may begin inside it, as after an opener that another one follows.

        Not so in Llama's format, where nested calls would be parsed again and again.
        """
        again = [] if self._form == "llama" else self._held[self._opened + 1 :]
        del self._held[len(self._held) - len(again) :]
        self._release()
        for char in again:
            self._see(char)

    def _end_body(self) -> None:
        self._calls = read_calls("".join(self._body), self._form, self._names)
        if not self._calls:
            self._give_up()
        elif self._form == "hermes":
            self._state, self._begun = "close", 0
        else:
            self._take()

    def _see_close(self, char: str) -> None:
        if CLOSER[self._begun] == char:
            self._held.append(char)
            self._begun += 1
            if self._begun == len(CLOSER):
                self._take()
        elif not self._begun and char in SPACE:
            self._held.append(char)
        else:
            self._give_up()
            self._see(char)

    def _enter(self) -> None:
        """Start a possible call."""
        self._state, self._begun = "body", 0
        self._scan, self._body, self._has_key = JsonScan(), [], False

    def _take(self) -> None:
        """Accept the held text as a call."""
        self._done += self._calls
        self._held = []
        self._state, self._begun = "text", 0
        self._is_line_start = self._is_after_call = True

    def _release(self) -> None:
        """Release the held text, without white space after a call."""
        held, self._held = "".join(self._held), []
        self._state, self._begun = "text", 0
        if held:
            self._put(held)

    def _put(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip(" \t\r\n;" if self._form == "llama" else " \t\r\n")
        if text:
            self._out.append(text)
            self._is_after_call = False
            self._is_line_start = text.rstrip(" \t\r").endswith("\n")


def read_calls(text: str, form: Form, names: frozenset[str]) -> tuple[ToolCall, ...]:
    """The calls in a JSON text; empty if any of them is malformed."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    values = value if form == "mistral" and isinstance(value, list) else [value]
    calls = [_read_call(one, form, names) for one in values]
    good = tuple(call for call in calls if call is not None)
    return good if len(good) == len(calls) else ()


def _read_call(value: object, form: Form, names: frozenset[str]) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", None if form == "llama" else {}))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number beyond all floats, which JSON may hold and Python reads as infinity
        return None
    return ToolCall(name, text if _is_unicode(text) else json.dumps(arguments))


def _is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate, which JSON's escapes can spell."""
    return not any("\ud800" <= char <= "\udfff" for char in text)

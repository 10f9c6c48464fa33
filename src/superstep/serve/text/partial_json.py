"""Finds the end of a JSON object or list in a stream of text, and rejects what cannot be one."""

from __future__ import annotations

from typing import Literal

MOST_DEPTH = 64
"""Of nested brackets."""

BARE = frozenset('{}[]:," \t\r\n0123456789+-.eEtrufalsn')
"""All characters outside of strings in JSON."""

ScanState = Literal["more", "end", "broken"]


class JsonScan:
    """Reads one character at a time, from the opening bracket on.

    It knows brackets and strings, not all of JSON: ``json`` reads the result at the end. What it rejects cannot be
    JSON, so text that only begins like a call is released at once.
    """

    def __init__(self) -> None:
        self._brackets: list[str] = []
        self._is_text = False
        self._is_escaped = False

    def see(self, char: str) -> ScanState:
        """Read a character: the value goes on, ends here, or is invalid."""
        if self._is_text:
            return self._see_text(char)
        if char not in BARE or (not self._brackets and char not in "{["):
            return "broken"
        match char:
            case '"':
                self._is_text = True
            case "{" | "[":
                if len(self._brackets) == MOST_DEPTH:
                    return "broken"
                self._brackets.append("}" if char == "{" else "]")
            case "}" | "]":
                if self._brackets.pop() != char:
                    return "broken"
                return "more" if self._brackets else "end"
        return "more"

    def _see_text(self, char: str) -> ScanState:
        if char < " ":
            return "broken"
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_text = False
        return "more"

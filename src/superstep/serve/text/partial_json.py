"""Where a JSON object or list ends in text that still comes, and whether it can be one at all."""

from __future__ import annotations

from typing import Literal

MOST_DEPTH = 64
"""Of brackets within brackets."""

BARE = frozenset('{}[]:," \t\r\n0123456789+-.eEtrufalsn')
"""All that stands outside a text in JSON."""

Seen = Literal["more", "end", "broken"]


class JsonScan:
    """Sees one character after another, from the opening bracket on.

    It knows brackets and texts, not all of JSON: what it lets pass is read by ``json`` at the end. What it stops at can
    be no JSON, so that text which only begins like a call is given out at once.
    """

    def __init__(self) -> None:
        self._brackets: list[str] = []
        self._is_text = False
        self._is_escaped = False

    def see(self, char: str) -> Seen:
        """One more character: the value goes on, ends with it, or is broken by it."""
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

    def _see_text(self, char: str) -> Seen:
        if char < " ":
            return "broken"
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_text = False
        return "more"

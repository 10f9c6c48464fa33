"""Marks around a client's spellings of control tokens, to distinguish them from the template's own after rendering.

The marks are private characters that occur neither in the chat nor in its template, so no client can forge them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from superstep.errors import ConfigError

FIRST = 0xF0000
"""The first private character of plane 15, which has no standard meaning."""

LAST = FIRST + 0xFFFE


@dataclass(frozen=True, slots=True)
class Marks:
    """Three characters, and the spellings that they mark.

    Attributes:
        begin: before a spelling.
        close: after it.
        end: after the last message's text, where that is continued.
        control: spellings that are marked everywhere.
        in_others: spellings that are marked except in the assistant's messages, which may contain them.
    """

    begin: str
    close: str
    end: str
    control: tuple[str, ...]
    in_others: tuple[str, ...] = ()

    def put(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """A template's variables with marks, in new objects."""
        everywhere = _pattern(self.control)
        elsewhere = _pattern((*self.control, *self.in_others))
        marked = {name: self._mark(value, elsewhere) for name, value in variables.items() if name != "messages"}
        marked["messages"] = [
            self._mark(message, everywhere if message["role"] == "assistant" else elsewhere)
            for message in variables["messages"]
        ]
        return marked

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Parts of a marked text, and whether each was marked. Unpaired marks are left out."""
        marked = re.compile(f"{self.begin}([^{self.begin}{self.close}]*){self.close}|[{self.begin}{self.close}]")
        place = 0
        for match in marked.finditer(text):
            yield text[place : match.start()], False
            yield match[1] or "", True
            place = match.end()
        yield text[place:], False

    def _mark(self, value: Any, pattern: re.Pattern[str] | None) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(value, str):
            return pattern.sub(f"{self.begin}\\g<0>{self.close}", value) if pattern else value
        if isinstance(value, Mapping):
            return {self._mark(key, pattern): self._mark(inner, pattern) for key, inner in value.items()}
        if isinstance(value, Sequence):
            return [self._mark(inner, pattern) for inner in value]
        return value


def marks_for(variables: Mapping[str, Any], control: Sequence[str], source: str, plain: Sequence[str] = ()) -> Marks:
    """Marks that do not occur in a chat.

    Args:
        variables: of the template.
        control: spellings of control tokens.
        source: the template.
        plain: spellings of other added tokens; those in the template count as control tokens.

    Raises:
        ConfigError: the chat uses all characters that could be marks.
    """
    taken = source + json.dumps(variables, ensure_ascii=False)
    free = list(islice((char for char in map(chr, range(FIRST, LAST)) if char not in taken), 3))
    if len(free) < 3:
        raise ConfigError(
            "messages hold every private character of plane 15, and three of them are needed; leave some out."
        )
    begin, close, end = free
    return Marks(begin, close, end, control=tuple(control), in_others=tuple(text for text in plain if text in source))


def _pattern(spellings: Sequence[str]) -> re.Pattern[str] | None:
    """Any of some spellings, longer ones first."""
    longest = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest))) if longest else None

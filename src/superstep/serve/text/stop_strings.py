"""Stop texts: an answer ends where one is complete, and the stop text is left out.

The stream may be cut anywhere. Of stop texts that end at the same character the longest counts, so that none of its
characters was released before. Text that may become a stop text is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superstep.errors import ConfigError

MOST_STOPS = 32
"""Limit of the number: each character is compared with each stop text."""

MOST_CHARS = 1000
"""The longest stop text: as many characters of an answer may be held back."""


@dataclass(frozen=True, slots=True)
class StopResult:
    """Released text.

    Attributes:
        text: may be empty.
        stop: the stop text that ended the answer; None while it goes on.
    """

    text: str = ""
    stop: str | None = None


def check_stops(stops: Sequence[str]) -> None:
    """Check the stop texts of a request.

    Raises:
        ConfigError: the message names the value, the rule and what would work.
    """
    if len(stops) > MOST_STOPS:
        raise ConfigError(f"stop has {len(stops)} texts; give at most {MOST_STOPS}.")
    for stop in stops:
        if not stop:
            raise ConfigError("stop holds an empty text, which ends every answer at once; leave it out.")
        if len(stop) > MOST_CHARS:
            raise ConfigError(f"stop holds a text of {len(stop)} characters; give at most {MOST_CHARS}.")


class StopFinder:
    """Finds stop texts in one answer.

    Args:
        stops: checked by ``check_stops``; empty releases everything.
        include_stop: whether the stop text itself is released too.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""
        self._is_over = False

    def push(self, text: str) -> StopResult:
        """Released text after more input, and the stop text that it completes. Text after that one is dropped."""
        assert not self._is_over, "a stop text was found before"
        if not self._stops:
            return StopResult(text)
        buffer = self._held + text
        for place in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[place])
            if stop is not None:
                self._is_over = True
                end = place + 1 if self._include_stop else place + 1 - len(stop)
                return StopResult(buffer[:end], stop)
        certain = len(buffer) - max(self._matched)
        self._held = buffer[certain:]
        return StopResult(buffer[:certain])

    def end(self) -> StopResult:
        """The text that was held back, after the end."""
        held, self._held = self._held, ""
        return StopResult("" if self._is_over else held)

    def _advance(self, char: str) -> str | None:
        """Advance each stop text by a character (Knuth, Morris & Pratt 1977); the longest that is complete."""
        done = ""
        for k, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            size = self._matched[k]
            while size and stop[size] != char:
                size = borders[size - 1]
            if stop[size] == char:
                size += 1
            self._matched[k] = size
            if size == len(stop) > len(done):
                done = stop
        return done or None


def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    size = 0
    for place in range(1, len(stop)):
        while size and stop[size] != stop[place]:
            size = borders[size - 1]
        if stop[size] == stop[place]:
            size += 1
        borders[place] = size
    return tuple(borders)

"""Draft tokens from the text itself: what followed the last tokens where they occurred before (prompt lookup, Saxena
2023).

    text      to be or not to be | or not to
    draft

Earlier positions are found as a compressor finds its matches (Deutsch 1996): a table from each pair of tokens to its
last position, and for each position the previous one with the same pair. The cost of a token or draft does not grow
with the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

SHORTEST = 2
"""Tokens that must match: one alone predicts little."""

LONGEST = 16
"""Most tokens that are compared: longer matches are as good."""

TRIED = 16
"""Positions that are compared for one draft."""


class PairLookup:
    """Positions of the token pairs of one text. The text may only grow between two calls."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}
        self._before = array("q")  # previous position of the pair before each position; 0 is none, as no pair ends at 0

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """The tokens that followed the longest earlier occurrence of the text's end, the last one of equals; empty
        without one.

        Args:
            tokens: the text so far.
            most: tokens to draft. A copy that reaches the text's end continues with itself.
        """
        self._grow(tokens)
        place = self._place(tokens)
        if not place:
            return ()
        period = len(tokens) - place
        return tuple(tokens[place + step % period] for step in range(most))

    def _grow(self, tokens: Sequence[int]) -> None:
        """Add the pairs of new tokens."""
        for place in range(len(self._before), len(tokens)):
            if place < SHORTEST:
                self._before.append(0)
                continue
            pair = (tokens[place - 2], tokens[place - 1])
            self._before.append(self._last.get(pair, 0))
            self._last[pair] = place

    def _place(self, tokens: Sequence[int]) -> int:
        """The position after the longest earlier occurrence of the text's end; 0 without one."""
        if len(tokens) < SHORTEST:
            return 0
        place = self._last.get((tokens[-2], tokens[-1]), 0)
        best, best_size = place, SHORTEST
        for _ in range(TRIED):
            if not place or best_size >= LONGEST:
                break
            size = _count_shared(tokens, place)
            if size > best_size:
                best, best_size = place, size
            place = self._before[place]
        return best


def _count_shared(tokens: Sequence[int], place: int) -> int:
    """Number of equal tokens before ``place`` and before the text's end."""
    size, end = SHORTEST, len(tokens)
    while size < min(LONGEST, place) and tokens[place - size - 1] == tokens[end - size - 1]:
        size += 1
    return size

"""Guesses from a text itself: what followed when its last tokens stood there before (prompt lookup, Saxena 2023).

    text      to be or not to be | or not to
                                   guessed

Earlier places are found as a compressor finds its matches (Deutsch 1996): a table from each pair of tokens to where it
stood last, and for each place the one before it with the same pair. A token more costs as much whatever the text's
length, and so does a guess.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

SHORTEST = 2
"""Tokens that must have stood before: one alone says little."""

LONGEST = 16
"""Tokens that are compared at the most: of two places that agree so far, either will do."""

TRIED = 16
"""Places that are compared for one guess."""


class PairLookup:
    """Where the pairs of one text stood. The text may only grow between two calls."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}
        self._before = array("q")  # by the place behind a pair; 0 where there is none, for nothing stands before 0

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """The tokens that followed the longest end of the text that stood there before, of several the last one; none
        where there is none.

        Args:
            tokens: the text so far.
            most: tokens to guess. A copy that meets the text's end goes on with itself.
        """
        self._grow(tokens)
        place = self._place(tokens)
        if not place:
            return ()
        period = len(tokens) - place
        return tuple(tokens[place + step % period] for step in range(most))

    def _grow(self, tokens: Sequence[int]) -> None:
        """Note each pair behind which a token stands."""
        for place in range(len(self._before), len(tokens)):
            if place < SHORTEST:
                self._before.append(0)
                continue
            pair = (tokens[place - 2], tokens[place - 1])
            self._before.append(self._last.get(pair, 0))
            self._last[pair] = place

    def _place(self, tokens: Sequence[int]) -> int:
        """The place behind the longest earlier stand of the text's end; 0 where there is none."""
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
    """How many tokens before a place are those before the text's end."""
    size, end = SHORTEST, len(tokens)
    while size < min(LONGEST, place) and tokens[place - size - 1] == tokens[end - size - 1]:
        size += 1
    return size

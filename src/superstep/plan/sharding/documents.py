"""Documents in a packed sequence, and the parts of its attention where each document sees only itself.

A document is a run of neighbouring tokens, so the needed scores are one triangle for each::

    keys     a a a b b c c c
    a a a    ◣               queries of document a, all three
    b b            ◣
    c c c              ◣

A ring cuts these (see ``plan.sharding.sequence``), and each of its blocks is simple again. With a rank's own keys it is
a triangle for each document with tokens here. With another rank's keys it is one rectangle or nothing: those keys all
come before the queries, so a document in both has the last keys and the first queries.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from superstep.plan.sharding.sequence import AttentionBlock


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of one document, by their places among the rank's own tokens and the source's.

    Attributes:
        is_causal: whether these are the same tokens, each of which sees the keys up to its own place; otherwise every
        query sees every key.
    """

    queries: slice
    keys: slice
    is_causal: bool


@dataclass(frozen=True, slots=True)
class RankTokens:
    """The tokens of a cp rank: two chunks of the sequence, or all of it where cp = 1."""

    tokens: int
    cp: int
    rank: int

    def before(self, position: int) -> int:
        """How many of them stand before a position of the sequence: its place, or where it would be, among them."""
        if self.cp == 1:
            return position
        chunk = self.tokens // (2 * self.cp)
        starts = self.rank * chunk, (2 * self.cp - 1 - self.rank) * chunk
        return sum(min(max(position - start, 0), chunk) for start in starts)

    def cuts(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """The begin of each document with tokens here, among them, and last their number."""
        return tuple(dict.fromkeys(self.before(bound) for bound in bounds))

    def position(self, place: int) -> int:
        """The inverse of ``before``: a held token's position in the sequence."""
        if self.cp == 1:
            return place
        chunk = self.tokens // (2 * self.cp)
        return self.rank * chunk + place if place < chunk else (2 * self.cp - 2 - self.rank) * chunk + place


def tiles(block: AttentionBlock, bounds: Sequence[int], *, cp: int, rank: int) -> Iterator[Tile]:
    """What a cp rank computes of a block, where each document sees only itself.

    Args:
        block: one of ``plan.sharding.sequence.blocks``.
        bounds: the begin of each document, from 0 on, and last the sequence's length.
        cp: ranks over which the sequence is cut.
        rank: the cp rank of the queries.
    """
    mine, theirs = RankTokens(bounds[-1], cp, rank), RankTokens(bounds[-1], cp, block.source)
    if block.is_causal:
        yield from (Tile(slice(a, b), slice(a, b), is_causal=True) for a, b in pairwise(mine.cuts(bounds)))
        return
    held = bounds[-1] // cp
    asking, answering = block.queries(held), block.keys(held)
    document = bisect_right(bounds, mine.position(asking.start)) - 1
    first = max(answering.start, theirs.before(bounds[document]))
    if first < answering.stop:
        queries = slice(asking.start, mine.before(bounds[document + 1]))
        yield Tile(queries, slice(first, answering.stop), is_causal=False)

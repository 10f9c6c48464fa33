"""How context parallelism cuts a sequence, and what each rank computes of its causal attention.

The sequence is cut into 2 · cp chunks, and cp rank r holds the chunks r and 2 · cp - 1 - r, in that order. An early
chunk has few keys before it and its late partner many, so all ranks compute equally much (the zig-zag of the Llama 3
report, sec. 3.3.2):

    cp=4    chunk  0 1 2 3 4 5 6 7
            rank   0 1 2 3 3 2 1 0

With sequence parallelism, tp rank t of cp rank r holds the t-th contiguous part of r's own tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """What a cp rank computes with another's keys: a part of its queries with a part of the keys.

    Each holds ``tokens`` in two chunks, and of a pair of chunks either every score is needed or none is:

        own       all queries, all keys, the lower triangle of it
        earlier   the keys of a smaller rank: all queries, the keys of the first chunk
        later     the keys of a greater rank: the queries of the second chunk, all keys
    """

    source: int
    kind: Literal["own", "earlier", "later"]

    @property
    def is_causal(self) -> bool:
        """Whether a query sees only the keys up to its own place."""
        return self.kind == "own"

    def queries(self, tokens: int) -> slice:
        """The places of the queries among the rank's own tokens."""
        return slice(tokens // 2 if self.kind == "later" else 0, tokens)

    def keys(self, tokens: int) -> slice:
        """The places of the keys among the source's tokens."""
        return slice(0, tokens // 2 if self.kind == "earlier" else tokens)

    def scores(self, tokens: int) -> int:
        """The number of needed products of a query and a key."""
        if self.is_causal:
            return tokens * (tokens + 1) // 2
        held = range(tokens)
        return len(held[self.queries(tokens)]) * len(held[self.keys(tokens)])


def blocks(rank: int, cp: int) -> tuple[AttentionBlock, ...]:
    """The blocks of a cp rank as keys go round the ring: its own first, then its predecessor's."""
    sources = ((rank - step) % cp for step in range(cp))
    return tuple(AttentionBlock(s, "own" if s == rank else "earlier" if s < rank else "later") for s in sources)


def positions(tokens: int, *, cp: int, rank: int, tp: int = 1, part: int = 0) -> tuple[int, ...]:
    """The positions of a rank's own tokens in the sequence of ``tokens``, in the order in which it holds them.

    Args:
        tokens: the whole sequence, a multiple of ``multiple(cp, tp)``.
        rank: the cp rank.
        tp: ranks that share the cp rank's tokens by sequence parallelism; 1 without it.
        part: the tp rank.
    """
    assert tokens % multiple(cp, tp) == 0
    if cp == 1:
        held = range(tokens)
        return tuple(held[tokens // tp * part : tokens // tp * (part + 1)])
    chunk = tokens // (2 * cp)
    early, late = rank * chunk, (2 * cp - 1 - rank) * chunk
    whole = (*range(early, early + chunk), *range(late, late + chunk))
    share = len(whole) // tp
    return whole[share * part : share * (part + 1)]


def places(tokens: int, cp: int) -> tuple[int, ...]:
    """The inverse: the place of each position where the ranks' tokens lie side by side."""
    side_by_side = [at for rank in range(cp) for at in positions(tokens, cp=cp, rank=rank)]
    owners = [0] * tokens
    for place, at in enumerate(side_by_side):
        owners[at] = place
    return tuple(owners)


def multiple(cp: int, tp: int = 1) -> int:
    """The length of a sequence cut over cp, and within over tp (1 without sequence parallelism), is a multiple."""
    return tp if cp == 1 else cp * math.lcm(2, tp)


def cp_of_tokens(tokens: int, tp: int = 1) -> list[int]:
    """Every cp that can cut a sequence of ``tokens``, ascending."""
    return [cp for cp in range(1, tokens // 2 + 1) if tokens % multiple(cp, tp) == 0]


def cp_of_heads(heads: int, kv_heads: int, tp: int = 1) -> list[int]:
    """Every cp for Ulysses, ascending: a tp rank's query heads split evenly, and so do its kv heads, or each of these
    goes whole to equally many ranks.
    """
    own, kv_own = heads // tp, kv_heads // tp
    return [cp for cp in range(1, own + 1) if own % cp == 0 and (kv_own % cp == 0 or cp % kv_own == 0)]

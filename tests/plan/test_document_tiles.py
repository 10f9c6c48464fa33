"""The tiles of documents cover every score that is needed, once, and no other."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superstep.plan.sharding.documents import RankTokens, tiles
from superstep.plan.sharding.sequence import blocks, positions


@st.composite
def packed(draw):
    """A sequence that cp ranks share, and where its documents start and end."""
    cp = draw(st.integers(1, 4))
    tokens = draw(st.integers(1, 6)) * (1 if cp == 1 else 2 * cp)
    starts = draw(st.sets(st.integers(1, tokens - 1))) if tokens > 1 else set()
    return cp, [0, *sorted(starts), tokens]


def scores(cp, bounds):
    """How often each pair of positions is computed, over all ranks and turns of the ring."""
    tokens = bounds[-1]
    held = [positions(tokens, cp=cp, rank=rank) for rank in range(cp)]
    found = Counter()
    for rank in range(cp):
        for block in blocks(rank, cp):
            for tile in tiles(block, bounds, cp=cp, rank=rank):
                queries, keys = held[rank][tile.queries], held[block.source][tile.keys]
                found.update((q, k) for q, k in product(queries, keys) if k <= q or not tile.is_causal)
    return found


@settings(max_examples=300)
@given(packed())
def test_every_pair_of_a_document_is_computed_once_and_no_other(drawn):
    cp, bounds = drawn
    document = [sum(bound <= at for bound in bounds[1:]) for at in range(bounds[-1])]
    wanted = {(q, k): 1 for q in range(bounds[-1]) for k in range(q + 1) if document[q] == document[k]}
    assert scores(cp, bounds) == wanted


@given(packed())
def test_another_ranks_keys_meet_one_rectangle_at_most(drawn):
    cp, bounds = drawn
    for rank in range(cp):
        for block in blocks(rank, cp):
            found = list(tiles(block, bounds, cp=cp, rank=rank))
            assert all(tile.is_causal for tile in found) if block.is_causal else len(found) <= 1


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_a_place_is_the_number_of_held_tokens_before_it(cp):
    for rank in range(cp):
        at = positions(12, cp=cp, rank=rank)
        held = RankTokens(12, cp, rank)
        assert [held.before(p) for p in range(13)] == [sum(p < end for p in at) for end in range(13)]
        assert tuple(held.position(place) for place in range(len(at))) == at

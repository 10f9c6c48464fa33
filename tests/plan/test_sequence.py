"""Zig-zag sharding: every token once, every score once, equally many on each rank."""

import pytest

from superstep.plan.sharding.sequence import blocks, cp_of_heads, cp_of_tokens, multiple, places, positions

CPS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("cp", CPS)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_ranks_hold_every_position_once_and_places_is_the_inverse(cp, tp):
    tokens = 2 * multiple(cp, tp)
    held = [positions(tokens, cp=cp, rank=r, tp=tp, part=t) for r in range(cp) for t in range(tp)]
    assert {len(part) for part in held} == {tokens // cp // tp}
    side_by_side = [at for part in held for at in part]
    assert sorted(side_by_side) == list(range(tokens))
    assert [side_by_side[place] for place in places(tokens, cp)] == list(range(tokens))


def test_the_order_is_that_of_the_drawing():
    assert [positions(8, cp=4, rank=rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert positions(16, cp=2, rank=1, tp=2, part=1) == (8, 9, 10, 11)
    assert places(8, 4) == (0, 2, 4, 6, 7, 5, 3, 1)


@pytest.mark.parametrize("cp", CPS)
@pytest.mark.parametrize("chunk", [1, 3])
def test_blocks_are_the_causal_scores_each_once_and_equally_many_on_each_rank(cp, chunk):
    tokens = 2 * cp * chunk
    share = tokens // cp
    found, counts = [], set()
    for rank in range(cp):
        queries = positions(tokens, cp=cp, rank=rank)
        seen = []
        for block in blocks(rank, cp):
            keys = positions(tokens, cp=cp, rank=block.source)[block.keys(share)]
            pairs = [(q, k) for q in queries[block.queries(share)] for k in keys]
            if block.is_causal:
                pairs = [(q, k) for q, k in pairs if k <= q]
            assert len(pairs) == block.scores(share)
            seen += pairs
        found += seen
        counts.add(len(seen))
    assert sorted(found) == [(q, k) for q in range(tokens) for k in range(q + 1)]
    assert len(counts) == 1


@pytest.mark.parametrize("cp", CPS)
def test_a_block_comes_from_the_neighbour_that_had_it_before(cp):
    for rank in range(cp):
        before = [block.source for block in blocks((rank - 1) % cp, cp)]
        assert [block.source for block in blocks(rank, cp)] == [rank, *before[:-1]]


def test_what_can_cut_a_sequence_is_what_positions_takes():
    for tokens in (2, 12, 16, 24, 30):
        for tp in (1, 2, 4):
            choices = cp_of_tokens(tokens, tp)
            for cp in range(1, tokens + 1):
                if cp in choices:
                    assert len(positions(tokens, cp=cp, rank=cp - 1, tp=tp, part=tp - 1)) == tokens // cp // tp
                else:
                    with pytest.raises(AssertionError):
                        positions(tokens, cp=cp, rank=0, tp=tp)


def test_ulysses_takes_what_splits_heads_evenly():
    assert cp_of_heads(8, 8) == [1, 2, 4, 8]
    assert cp_of_heads(8, 2) == [1, 2, 4, 8]
    assert cp_of_heads(8, 8, tp=2) == [1, 2, 4]
    assert cp_of_heads(24, 6) == [1, 2, 3, 6, 12, 24]  # 4 and 8 would have a rank start inside a kv head's queries
    assert cp_of_heads(14, 2) == [1, 2, 14]

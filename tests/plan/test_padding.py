"""How a vocabulary is padded, on the ranks and in every prediction."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superstep.cost.closed.model_numbers import array, decoder_of
from superstep.cost.program.flops import local_dims
from superstep.engine.flat.layout import lay_out
from superstep.errors import ConfigError
from superstep.model.axes import units
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.mesh import Coordinate
from superstep.plan.resolution.resolve import resolve
from superstep.plan.sharding.padding import ALIGN, pad_vocab


def run_of(vocab, tp, *, tied=True, exact=False, **plan):
    return resolve(
        RunConfig(
            model=ModelConfig(name="tiny", heads=8, kv_heads=8, head_dim=8, vocab=vocab, tied=tied),
            data=DataConfig(sequence_tokens=64),
            train=TrainConfig(batch_sequences=4),
            plan=PlanConfig(tp=tp, **plan),
            numerics=NumericsConfig(exact=exact),
        )
    )


@given(st.integers(1, 300_000), st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
def test_padding_is_none_or_as_little_as_whole_lanes_need(vocab, parts):
    rows = pad_vocab(vocab, parts)
    assert rows % parts == 0
    if vocab % parts == 0:
        assert rows == vocab
    else:
        assert rows // parts % ALIGN == 0
        assert vocab < rows < vocab + parts * ALIGN


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@settings(max_examples=50)
@given(vocab=st.integers(2, 600), tp=st.sampled_from([1, 2, 4, 8]))
def test_every_token_lies_on_one_rank_and_no_buffer_is_longer_than_another(exact, tied, vocab, tp):
    run = run_of(vocab, tp, tied=tied, exact=exact)
    plan, held = run.plan, []
    for place in range(tp):
        layouts = lay_out(
            units(run.shape),
            plan.mesh,
            Coordinate(pp=0, dp=0, cp=0, tp=place),
            plan.rules,
            sequence_parallel=plan.sequence_parallel,
            padding=plan.padding,
        )
        slots = [slot for unit in layouts for b in unit for slot in b.slots if "vocab" in slot.spec.axes]
        assert len(slots) == (1 if tied else 2)
        assert all(slot.local_shape[0] == local_dims(run).V for slot in slots)
        held += range(*slots[0].index[0].indices(vocab))
    assert held == list(range(vocab))
    assert (dict(plan.padding).get("vocab", vocab) == vocab) == (vocab % (8 if exact else tp) == 0)


@settings(max_examples=50)
@given(vocab=st.integers(2, 60_000), tp=st.sampled_from([1, 2, 4, 8]))
def test_prices_in_closed_form_have_the_same_rows(vocab, tp):
    run = run_of(vocab, tp)
    model = decoder_of(run.shape, 64)
    assert model.vocab_part(array(tp)) == local_dims(run).V


def test_what_is_no_vocabulary_still_has_to_split():
    with pytest.raises(ConfigError, match=r"model\.heads = 8 does not split over plan\.tp = 3; set plan\.tp to one of"):
        run_of(510, 3)
    assert dict(run_of(511, 2, rules=(("vocab", "none"),)).plan.padding) == {}

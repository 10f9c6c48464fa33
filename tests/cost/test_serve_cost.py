"""What an engine step takes: kinds of work counted, seconds fitted, and what holds a step back."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from superstep.cost.fit_serving import MeasuredStep, fit, least_squares
from superstep.cost.serve import (
    KNOTS,
    TERMS,
    AttentionGroup,
    ComputeMode,
    StepWork,
    bounds,
    counts,
    model_of_rank,
    rate_published,
    seconds,
)
from superstep.hardware.cluster_file import cluster
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of

WAY = ComputeMode(name="bf16", tp=1, block_keys=64, is_paged=True)
TRUE = {
    "step": 2e-4, "layer": 1e-4, "request": 3e-5, "row": 4e-6, "wide": 2e-8, "draw": 5e-5, "noise": 3e-8, "keys": 1e-10,
    "group": 3e-5, "gather": 5e-10, "places": 1e-7, "pairs": 2e-11,
} | {f"rows_{rows}": 1e-10 + 4e-12 * rows for rows in KNOTS}  # fmt: skip


def model(**changes):
    return model_of_rank(shape_of(ModelConfig(**{"name": "demo", **changes})), tp=1, number_bytes=2)


def works(seed, count):
    draw = Random(seed)
    for _ in range(count):
        single = draw.choice([0, 1, 2, 4, 8, 9, 16, 32, 64])
        chunks = [draw.choice([4, 16, 64, 120]) for _ in range(draw.randint(0 if single else 1, 3))]
        drawn = single + draw.randint(0, len(chunks))
        yield StepWork(
            rows=single + sum(chunks),
            requests=single + len(chunks),
            wanted=drawn,
            drawn=drawn,
            chance=draw.choice([0, drawn]),
            paged_keys=single * draw.randint(1, 900),
            groups=tuple(AttentionGroup(texts=1, rows=rows, keys=64 * draw.randint(2, 12)) for rows in chunks),
        )


def test_fitted_seconds_predict_another_model_and_other_steps():
    """With the noise of a machine, and some steps beside which something else ran."""
    draw = Random(1)
    true = replace(fit([MeasuredStep(model(), work, 1.0) for work in works(9, 40)], WAY), term_s=tuple(TRUE.items()))
    found = []
    for made in (model(), model(width=256, layers=2, ffn=512), model(width=512, layers=6, vocab=8192)):
        for number, work in enumerate(works(made.width, 150)):
            slower = 5.0 if number % 20 == 0 else 1 + 0.02 * draw.random()
            found.append(MeasuredStep(made, work, seconds(true, made, work) * slower))
    rate = fit(found, WAY)
    other = model(width=384, layers=9, ffn=1024)
    off = [seconds(rate, other, work) / seconds(true, other, work) - 1 for work in works(77, 60)]
    assert np.median(np.abs(off)) < 0.03
    assert max(map(abs, off)) < 0.15
    assert all(second >= 0 for _, second in rate.term_s)
    assert rate.spread < 0.05


def test_more_rows_never_take_less_for_a_weight():
    draw = Random(3)
    found = [MeasuredStep(model(), work, 1e-3 * draw.random() + 1e-4) for work in works(4, 80)]
    known = dict(fit(found, WAY).term_s)
    each = [known[f"rows_{rows}"] for rows in KNOTS]
    assert each == sorted(each)


def test_least_squares_is_the_best_of_all_choices_of_zeros():
    draw = np.random.default_rng(0)
    for _ in range(20):
        many, wanted = draw.normal(size=(12, 5)), draw.normal(size=12)
        best = np.inf
        for mask in range(32):
            free = [k for k in range(5) if mask >> k & 1]
            x = np.zeros(5)
            if free:
                x[free] = np.linalg.lstsq(many[:, free], wanted, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(many @ x - wanted)))
        found = least_squares(many, wanted)
        assert (found >= 0).all()
        assert np.linalg.norm(many @ found - wanted) == pytest.approx(best, abs=1e-9)


def test_a_step_reads_all_weights_once_and_what_it_sees_of_keys():
    made = model()
    one = StepWork(rows=1, requests=1, wanted=1, drawn=1, chance=0, paged_keys=100)
    found = dict(zip(TERMS, counts(made, one), strict=True))
    shape = shape_of(ModelConfig(name="demo"))
    block = 2 * shape.width * shape.head_dim * (shape.heads + shape.kv_heads) + 3 * shape.width * shape.ffn
    assert found["rows_1"] == shape.layers * block + shape.vocab * shape.width == made.linears
    assert found["keys"] == 100 * 2 * 2 * shape.kv_heads * shape.head_dim * shape.layers
    assert sum(counts(made, replace(one, rows=12))[TERMS.index("rows_1") :]) == pytest.approx(made.linears)


def test_rows_that_nobody_asks_for_end_where_the_last_layers_keys_are_there():
    made, shape = model(), shape_of(ModelConfig(name="demo"))
    group = (AttentionGroup(texts=1, rows=512, keys=512),)
    prompt = StepWork(rows=512, requests=1, wanted=0, drawn=0, chance=0, paged_keys=0, groups=group)
    many, few = (dict(zip(TERMS, counts(made, prompt, leaves_rows=leaves), strict=True)) for leaves in (False, True))
    behind = shape.width * shape.head_dim * shape.heads + 3 * shape.width * shape.ffn
    assert few["rows_512"] == many["rows_512"] - behind
    assert few["pairs"] == pytest.approx(many["pairs"] * (shape.layers - 1) / shape.layers)
    everything = replace(prompt, wanted=512)
    assert (counts(made, everything, leaves_rows=True) == counts(made, everything)).all()


def test_experts_are_read_as_far_as_rows_meet_them():
    made = model(experts=8, experts_per_token=2)
    few, many = (
        counts(made, StepWork(rows=n, requests=n, wanted=0, drawn=0, chance=0, paged_keys=0)) for n in (1, 400)
    )
    read = [sum(each[TERMS.index("rows_1") :]) for each in (few, many)]
    assert read[0] == pytest.approx(made.layers * (made.dense + 2 * made.expert), rel=0.1)
    assert read[1] == pytest.approx(made.layers * (made.dense + 8 * made.expert), rel=0.01)


def test_one_stream_of_a_large_model_waits_for_memory_and_a_prompt_for_products():
    made = model_of_rank(shape_of(ModelConfig(name="llama3-8b")), tp=1, number_bytes=2)
    rate = rate_published(cluster("1xH100"), replace(WAY, is_paged=False), number_bytes=2, weight_bytes=2)
    one = StepWork(rows=1, requests=1, wanted=1, drawn=1, chance=0, paged_keys=500)
    prompt = StepWork(
        rows=512,
        requests=1,
        wanted=1,
        drawn=1,
        chance=0,
        paged_keys=0,
        groups=(AttentionGroup(texts=1, rows=512, keys=512),),
    )
    held = bounds(rate, made, [one])
    assert sum(held.values()) == pytest.approx(1)
    assert held["memory traffic"] > 0.4 > held["compute"]
    # 15 GB of weights at 80 % of 3.35 TB/s are 5.6 ms.
    assert 5.5e-3 < seconds(rate, made, one) < 15e-3
    assert bounds(rate, made, [prompt])["compute"] > 0.4

"""Scaling laws: what was published comes back from runs drawn from it, and what cannot be fitted is said."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drawn_runs import CHINCHILLA, FACTS, OPENAI, curves, isoflop, run_at
from superstep.errors import ConfigError
from superstep.plan.model.check_shape import check_shape
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.scaling.budget import best_for, best_of_flops, choices
from superstep.scaling.fit import HOFFMANN, KAPLAN, fit, residuals
from superstep.scaling.isoflop import fit_envelope, fit_isoflop, fit_size, fit_tokens
from superstep.scaling.laws import Hoffmann, Kaplan, PowerFrontier
from superstep.scaling.model_sizes import LADDER, non_embedding_parameters, shape_of
from superstep.scaling.runs import LossPoint, TrainingRun, keep_last_points
from superstep.scaling.summary import LEVEL, beyond, bootstrap, constants, estimate, study

laws = st.one_of(
    st.builds(
        Hoffmann,
        E=st.floats(0.3, 3),
        A=st.floats(50, 3000),
        B=st.floats(50, 3000),
        alpha=st.floats(0.2, 0.6),
        beta=st.floats(0.2, 0.6),
    ),
    st.builds(
        Kaplan,
        alpha_n=st.floats(0.04, 0.15),
        alpha_d=st.floats(0.04, 0.15),
        n_c=st.floats(1e13, 1e15),
        d_c=st.floats(1e13, 1e15),
    ),
)


@given(law=laws, log_flops=st.floats(17, 26))
def test_the_closed_form_is_the_numeric_minimum(law, log_flops):
    flops = 10**log_flops
    best = law.optimum(flops)
    assert 6 * best.params * best.tokens == pytest.approx(flops)
    steps = np.linspace(-0.5, 0.5, 2001)
    losses = [law.loss(n, flops / 6 / n) for n in (best.params * np.exp(steps)).tolist()]
    assert abs(steps[int(np.argmin(losses))]) < 2e-3
    grown = law.optimum(10 * flops)
    assert math.log10(grown.params / best.params) == pytest.approx(law.a)
    assert math.log10(grown.tokens / best.tokens) == pytest.approx(law.b)


def test_published_exponents_follow_from_published_constants():
    assert FACTS["chinchilla-c"] == pytest.approx(CHINCHILLA.a, abs=5e-4)
    assert CHINCHILLA.a + CHINCHILLA.b == pytest.approx(1)


def some_laws(seed):
    """One of each form, its constants anywhere around the published ones."""
    u = np.random.default_rng(seed).random(5).tolist()
    yield (
        HOFFMANN,
        Hoffmann(
            E=0.3 + 2.7 * u[0], A=50 * 60 ** u[1], B=50 * 60 ** u[2], alpha=0.2 + 0.4 * u[3], beta=0.2 + 0.4 * u[4]
        ),
    )
    scales = {"n_c": 10 ** (13 + 2 * u[0]), "d_c": 10 ** (13 + 2 * u[1])}
    yield KAPLAN, Kaplan(alpha_n=0.04 + 0.06 * u[2], alpha_d=0.08 + 0.06 * u[3], **scales)
    # Its data hardly matter: the constants are not told by the losses, but these must be met.
    yield KAPLAN, Kaplan(alpha_n=0.12 + 0.03 * u[2], alpha_d=0.05 + 0.03 * u[3], **scales)


@pytest.mark.parametrize("seed", range(4))
def test_a_law_comes_back_from_its_own_losses(seed):
    """The optimizer converges, wherever the law is: nothing is left of the residuals."""
    for number, (form, law) in enumerate(some_laws(seed)):
        sizes, tokens = np.geomspace(1e7, 1e10, 7).tolist(), np.geomspace(1e9, 1e12, 7).tolist()
        runs = [run_at(law, n, d) for n in sizes for d in tokens]
        found = fit(form, runs)
        assert np.abs(residuals(found, runs)).max() < 1e-6, law
        if number < 2:
            assert found.a == pytest.approx(law.a, rel=0.01), law


def test_kaplan_comes_back_from_its_published_constants():
    found = fit(KAPLAN, isoflop(OPENAI))
    for name, value in OPENAI.constants().items():
        assert found.constants()[name] == pytest.approx(value, rel=1e-3), name
    noisy = fit(KAPLAN, isoflop(OPENAI, noise=0.002, seed=1))
    assert (noisy.alpha_n, noisy.alpha_d) == pytest.approx((OPENAI.alpha_n, OPENAI.alpha_d), rel=0.03)


def test_one_outlier_moves_little():
    runs = isoflop(CHINCHILLA)
    spoilt = [*runs[:-1], run_at(replace(CHINCHILLA, E=3.0), runs[-1].params, runs[-1].final.tokens)]
    assert fit(HOFFMANN, spoilt).alpha == pytest.approx(CHINCHILLA.alpha, rel=1e-2)


def test_kaplan_laws_of_one_variable():
    sizes = [run_at(replace(OPENAI, d_c=1e-6), n, 1e12 * (1 + i % 2)) for i, n in enumerate((1e7, 1e8, 1e9, 1e10))]
    size = fit_size(sizes)
    assert size.constants() == pytest.approx({"alpha_N": OPENAI.alpha_n, "N_c": OPENAI.n_c})
    assert size.loss(1e9) == pytest.approx(sizes[2].final.loss)
    tokens = fit_tokens([run_at(replace(OPENAI, n_c=1e-6), 1e9, d) for d in (1e9, 1e10, 1e11)])
    assert tokens.constants() == pytest.approx({"alpha_D": OPENAI.alpha_d, "D_c": OPENAI.d_c})


def test_all_approaches_agree_on_the_same_law():
    """The two that know no law, on what Hoffmann's gives; Hoffmann's own were 0.50 and 0.49."""
    parabolas, envelope = fit_isoflop(isoflop(CHINCHILLA)), fit_envelope(curves(CHINCHILLA))
    assert parabolas.a == pytest.approx(CHINCHILLA.a, abs=1e-3)
    assert envelope.a == pytest.approx(CHINCHILLA.a, abs=0.02)
    for found in (parabolas, envelope):
        assert found.a + found.b == pytest.approx(1, abs=2e-3)
        assert 0.44 < found.a < FACTS["chinchilla-0"]
        assert found.optimum(1e21).params == pytest.approx(CHINCHILLA.optimum(1e21).params, rel=0.2)


def test_the_envelope_leaves_out_what_the_smallest_and_the_largest_size_win():
    """Of three sizes only the middle one has been beaten from both sides, and one is no power law."""
    with pytest.raises(ConfigError, match="1 sizes are best at some budget, beside the smallest and the largest"):
        fit_envelope(curves(CHINCHILLA, sizes=3))


def test_a_parabola_that_is_lowest_at_its_edge_does_not_count():
    falling = [run for run in isoflop(CHINCHILLA) if run.params < CHINCHILLA.optimum(run.final.flops).params * 0.5]
    with pytest.raises(ConfigError, match="0 budgets have 3 sizes"):
        fit_isoflop(falling)


@pytest.mark.long
def test_the_intervals_hold_the_truth_about_as_often_as_they_say():
    """Of 12 sets of runs, 90% intervals hold each constant in 8 at least, and are no wider than they need to be."""
    held = dict.fromkeys(("E", "A", "B", "alpha", "beta", "a"), 0)
    widths = []
    for seed in range(12):
        runs = isoflop(CHINCHILLA, noise=0.003, seed=seed, budgets=6, sizes=7)
        found = bootstrap(runs, lambda some, start: fit(HOFFMANN, some, start), resamples=50, seed=seed)
        for name, of in constants(found).items():
            if name in held:
                low, high = of.interval
                truth = CHINCHILLA.a if name == "a" else CHINCHILLA.constants()[name]
                held[name] += low <= truth <= high
                widths += [high - low] if name == "a" else []
    assert min(held.values()) >= 8, held
    assert np.median(widths) < 0.04


def test_resampling_is_seeded_and_by_runs():
    runs = isoflop(CHINCHILLA, noise=0.003, budgets=4, sizes=5)
    one, same, other = (study(runs, resamples=8, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.hoffmann.law == other.hoffmann.law
    assert one.hoffmann.resampled != other.hoffmann.resampled
    assert LEVEL == 0.9
    few = study(runs, resamples=0, seed=0)
    assert estimate(few.hoffmann, lambda law: law.a).interval is None


def test_points_of_a_curve_before_its_end_count_when_asked_for():
    runs = curves(CHINCHILLA, sizes=6)
    late = [replace(run, points=run.points[: 14 + i % 3 * 3]) for i, run in enumerate(runs)]
    high = [
        replace(run, points=(*(replace(p, loss=p.loss * 1.05) for p in run.points[:-1]), run.final)) for run in late
    ]
    last = study(keep_last_points(late), resamples=0, seed=0)
    assert study(high, resamples=0, seed=0, points="final").hoffmann == last.hoffmann
    everything = study(late, resamples=0, seed=0, points="all").hoffmann.law
    assert everything.a == pytest.approx(CHINCHILLA.a, rel=0.01)


@settings(max_examples=20)
@given(law=laws, log_device_s=st.floats(3, 9))
def test_a_constant_throughput_gives_the_closed_form(law, log_device_s):
    best = best_for(law, 10**log_device_s, lambda params: 4e14)
    closed = best_of_flops(law, 10**log_device_s * 4e14)
    assert best.params == pytest.approx(closed.params, rel=2e-3)
    assert best.loss == pytest.approx(closed.loss, rel=1e-6)
    assert best.flops == pytest.approx(6 * best.params * best.tokens)


def test_a_throughput_by_size_moves_the_best_model():
    asked = []

    def rising(params):
        asked.append(params)
        return 4e14 * params / (params + 1e10)

    even, larger = (best_for(CHINCHILLA, 3.6e7, each) for each in (lambda params: 4e14, rising))
    assert larger.params > 1.1 * best_of_flops(CHINCHILLA, larger.flops).params
    assert larger.loss > even.loss
    assert len(asked) < 100
    fits = best_for(CHINCHILLA, 3.6e7, lambda params: 4e14 if params < 2e9 else 0.0)
    assert fits.params == pytest.approx(2e9, rel=2e-3)
    assert fits.params < 2e9
    assert best_for(CHINCHILLA, 3.6e7, lambda params: 0.0) is None


def test_a_frontier_without_losses_has_a_best_model_too():
    frontier = PowerFrontier(a=0.5, b=0.5, flops_at=6e20, params_at=1e9, tokens_at=1e11)
    best = best_for(frontier, 1e6, lambda params: 2.4e15)
    assert (best.params, best.tokens, best.flops, best.loss) == pytest.approx((2e9, 2e11, 2.4e21, None))


def test_a_shape_is_as_large_as_asked_and_the_named_ones_come_back():
    for name in LADDER:
        shape = shape_of(non_embedding_parameters(SHAPES[name]))
        assert (shape.layers, shape.width, shape.ffn) == (
            SHAPES[name].layers,
            SHAPES[name].width,
            SHAPES[name].ffn,
        ), name
    for params in np.geomspace(1e6, 2e12, 40).tolist():
        shape = shape_of(params)
        check_shape(shape)
        assert shape.width == shape.heads * shape.head_dim
        assert non_embedding_parameters(shape) == pytest.approx(params, rel=0.1)


def test_what_lies_far_beyond_the_runs():
    runs = isoflop(CHINCHILLA)
    largest = max(run.params for run in runs)
    assert beyond(runs, largest, 1e9) == {}
    assert beyond(runs, 20 * largest, 1e9) == pytest.approx({"parameters": 20})
    assert set(beyond(runs, 20 * largest, 1e14)) == {"parameters", "tokens", "FLOPs"}


@settings(max_examples=20)
@given(
    points=st.lists(
        st.tuples(st.sampled_from((1e5, 1e7, 1.01e7, 1e12)), st.floats(1, 1e18), st.floats(1e-3, 1e3)),
        min_size=1,
        max_size=12,
    )
)
@example(
    points=[
        (1e5, 3.0, 1.0),
        (1e5, 9.0, 483.0),
        (1e5, 2.0, 1.0),
        (1e5, 1.0, 622.0),
        (1e5, 1.0, 492.0),
        (1e5, 4e16, 398.0),
    ]
)
@example(points=[(1e5, 1.0, 622.0), (1e5, 2.0, 610.0), (1e5, 4e16, 600.0)])
def test_runs_without_any_law_are_refused_or_fitted_by_numbers(points):
    runs = [
        TrainingRun(name=str(i), params=n, points=(LossPoint(tokens=d, loss=loss, flops=6 * n * d),))
        for i, (n, d, loss) in enumerate(points)
    ]
    try:
        found = study(runs, resamples=3, seed=0)
    except ConfigError:
        return
    chosen = choices(found, 1e24)
    estimates = [x for each in chosen.values() for x in (each.params, each.tokens, each.loss) if x is not None]
    assert all(math.isfinite(value) for x in estimates for value in (x.value, *(x.interval or ())))


def test_every_fit_has_its_choice():
    found = study(isoflop(CHINCHILLA, budgets=3), resamples=0, seed=0)
    assert set(choices(found, 1e21)) == {"hoffmann", "kaplan", "isoflop"}
    assert choices(found, 1e21)["isoflop"].loss is None

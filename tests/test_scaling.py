"""Scaling laws: what was published comes back from runs drawn from it, and what cannot be fitted is said."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superstep.cli.main import main
from superstep.cli.scaling import device_budget
from superstep.errors import ConfigError
from superstep.plan.config import ModelConfig, RunConfig
from superstep.plan.resolve import resolve
from superstep.plan.shape import SHAPES, check_shape
from superstep.plan.toml import write_config
from superstep.planner.scaling import LEVEL, beyond, bootstrap, constants, estimate, study
from superstep.planner.scaling_budget import best_for, best_of_flops, choices
from superstep.planner.scaling_fit import HOFFMANN, KAPLAN, fit, residuals
from superstep.planner.scaling_frontier import fit_envelope, fit_isoflop, fit_size, fit_tokens
from superstep.planner.scaling_laws import Hoffmann, Kaplan, PowerFrontier
from superstep.planner.scaling_runs import Point, Run, ended, read_csv
from superstep.planner.scaling_shapes import LADDER, non_embedding_parameters, shape_of

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "howto" / "fit-a-scaling-law.csv"


def facts():
    """The published constants, by their names in the file."""
    with (ROOT / "tests" / "data" / "published" / "facts.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["category"] == "scaling-law"]
    return {row["fact_id"]: float(row["value"].split()[0]) for row in rows}


FACTS = facts()
CHINCHILLA = Hoffmann(
    E=FACTS["chinchilla-6"],
    A=FACTS["chinchilla-7"],
    B=FACTS["chinchilla-8"],
    alpha=FACTS["chinchilla-9"],
    beta=FACTS["chinchilla-10"],
)
OPENAI = Kaplan(alpha_n=FACTS["kaplan-4"], alpha_d=FACTS["kaplan-5"], n_c=FACTS["kaplan-6"], d_c=FACTS["kaplan-7"])


def run_at(law, params, tokens, *, noise=0.0, rng=None):
    """A run to its end, with a loss from a law, and noise on its logarithm."""
    loss = law.loss(params, tokens) * math.exp(noise * rng.standard_normal() if rng else 0)
    return Run(
        name=f"{params:g} {tokens:g}",
        params=params,
        points=(Point(tokens=tokens, loss=loss, flops=6 * params * tokens),),
    )


def isoflop(law, *, noise=0.0, seed=0, budgets=7, sizes=9):
    """Budgets from 6e18 to 3e21 FLOPs, each spent on sizes up to ten times away from what is best for it."""
    rng = np.random.default_rng(seed)
    return [
        run_at(law, params, flops / 6 / params, noise=noise, rng=rng)
        for flops in np.geomspace(6e18, 3e21, budgets).tolist()
        for params in (law.optimum(flops).params * np.geomspace(0.1, 10, sizes)).tolist()
    ]


def curves(law, *, sizes=12, points=20):
    """Training curves of sizes from 40M to 10B, from 1 to 200 tokens a parameter."""
    return [
        Run(
            name=f"{params:g}",
            params=params,
            points=tuple(
                Point(tokens=tokens, loss=law.loss(params, tokens), flops=6 * params * tokens)
                for tokens in (params * np.geomspace(1, 200, points)).tolist()
            ),
        )
        for params in np.geomspace(4e7, 1e10, sizes).tolist()
    ]


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


@settings(deadline=None)
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
    assert study(high, resamples=0, seed=0, points="final").hoffmann == study(ended(late), resamples=0, seed=0).hoffmann
    everything = study(late, resamples=0, seed=0, points="all").hoffmann.law
    assert everything.a == pytest.approx(CHINCHILLA.a, rel=0.01)


@settings(deadline=None, max_examples=20)
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


@settings(deadline=None, max_examples=20)
@given(
    points=st.lists(
        st.tuples(st.sampled_from((1e5, 1e7, 1.01e7, 1e12)), st.floats(1, 1e18), st.floats(1e-3, 1e3)),
        min_size=1,
        max_size=12,
    )
)
def test_runs_without_any_law_are_refused_or_fitted_by_numbers(points):
    runs = [
        Run(name=str(i), params=n, points=(Point(tokens=d, loss=loss, flops=6 * n * d),))
        for i, (n, d, loss) in enumerate(points)
    ]
    try:
        found = study(runs, resamples=3, seed=0)
    except ConfigError:
        return
    chosen = choices(found, 1e24)
    estimates = [x for each in chosen.values() for x in (each.params, each.tokens, each.loss) if x is not None]
    assert all(math.isfinite(value) for x in estimates for value in (x.value, *(x.interval or ())))


# The command.


@pytest.fixture
def table(tmp_path):
    """Writes a CSV file of some rows below the given header."""

    def write(text, name="runs.csv"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_the_example_of_the_page_is_drawn_as_it_says():
    rng = np.random.default_rng(0)
    drawn = []
    for flops in np.geomspace(6e18, 3e21, 7):
        best = CHINCHILLA.optimum(flops).params
        for size in np.geomspace(3e7, 1.5e10, 15):
            if abs(math.log10(size / best)) < 0.85:
                params = float(f"{size:.3g}")
                tokens = float(f"{flops / 6 / params:.4g}")
                drawn.append(CHINCHILLA.loss(params, tokens) * math.exp(0.003 * rng.standard_normal()))
    assert [run.final.loss for run in read_csv(EXAMPLE)] == pytest.approx(drawn, abs=6e-5)


NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]?\d+)?")


def test_the_answer_that_the_page_shows_is_the_one_that_is_given(capsys):
    """Its words are; its numbers within 5%, since intervals may differ in a digit from machine to machine."""
    assert main(["scaling", str(EXAMPLE), "--budget", "10000xH100-hours"]) == 0
    said = {NUMBER.sub("#", line.strip()): line for line in capsys.readouterr().out.splitlines()}
    page = EXAMPLE.with_suffix(".md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(best use.*?)```", page, re.DOTALL)[1].splitlines()
    for line in shown:
        if line != "...":
            given, named = (
                [float(number.replace(",", "").rstrip(".")) for number in NUMBER.findall(text)]
                for text in (said[NUMBER.sub("#", line.strip())], line)
            )
            assert given == pytest.approx(named, rel=0.05), line
    assert len(shown) > 10


def test_the_answer_as_text_json_and_svg(tmp_path, capsys):
    out, plot = tmp_path / "law.json", tmp_path / "law.svg"
    argv = ["scaling", str(EXAMPLE), "--budget", "10000xH100-hours", "--params", "7e9", "--tokens=140e9"]
    assert main([*argv, "--resamples", "20", "--json", str(out), "--plot", str(plot)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    found = json.loads(out.read_text(encoding="utf-8"))
    assert set(found["fits"]) == {"hoffmann", "kaplan", "isoflop", "envelope", "size", "tokens"}
    law = {name: of["value"] for name, of in found["fits"]["hoffmann"]["constants"].items()}
    # Within what 0.3% of noise allows.
    assert law["alpha"] == pytest.approx(CHINCHILLA.alpha, rel=0.05)
    assert found["best"]["flops"] == pytest.approx(1e4 * 3600 * 0.4 * 989.5e12, rel=1e-3)
    assert found["best"]["params"] == pytest.approx(found["choices"]["hoffmann"]["params"]["value"], rel=2e-3)
    low, high = found["choices"]["hoffmann"]["params"]["interval"]
    assert low < CHINCHILLA.optimum(found["best"]["flops"]).params < high
    assert found["predicted"]["hoffmann"]["value"] == pytest.approx(CHINCHILLA.loss(7e9, 140e9), rel=5e-3)
    assert f"so {found['best']['params'] / 1e9:.3g}B parameters" in said.out
    assert "warning" not in said.out
    assert max(map(len, said.out.splitlines())) <= 120
    svg = ElementTree.parse(plot)
    circles = [each for each in svg.iter() if each.tag.endswith("circle") and each.get("r") == "2.5"]
    assert len(circles) == len(found["runs"])
    for each in circles:
        assert 0 < float(each.get("cx")) < 760
        assert 0 < float(each.get("cy")) < 440


def test_far_answers_are_warned_of_and_fits_that_fail_are_named(table, capsys):
    rows = "\n".join(f"{run.params},{run.final.tokens},{run.final.loss}" for run in isoflop(CHINCHILLA, budgets=2))
    argv = ["scaling", table("params,tokens,loss\n" + rows), "--budget-flops", "1e25", "--resamples", "0"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert re.search(r"warning: \d+B parameters and .* lie beyond the largest run, .* 3333 times its FLOPs", said)
    assert "no IsoFLOP parabolas: 2 budgets have 3 sizes" in said
    assert "no envelope of curves: " in said
    assert "[-]" in said


def test_flops_of_another_convention_are_warned_of(table, capsys):
    rows = "\n".join(
        f"{run.params},{run.final.tokens},{run.final.loss},{1.5 * run.final.flops}" for run in isoflop(CHINCHILLA)
    )
    assert main(["scaling", table("params,tokens,loss,flops\n" + rows), "--resamples", "0"]) == 0
    assert "warning: the runs' flops are 1.50 times 6 N D" in capsys.readouterr().out


def test_sizes_and_tokens_that_grow_together_leave_the_curves(table, capsys):
    """Runs of 200 tokens a parameter each: their ends lie on a line, and the answer is the envelope's."""
    rows = "\n".join(
        f"{run.name},{run.params},{point.tokens},{point.loss}" for run in curves(CHINCHILLA) for point in run.points
    )
    argv = ["scaling", table("run,params,tokens,loss\n" + rows), "--budget-flops", "1e22", "--resamples", "0"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "no Hoffmann, L(N, D) nor Kaplan, L(N, D): the correlation of log params and log tokens is 1.000" in said
    best = float(re.search(r"so ([\d.]+)B parameters", said)[1]) * 1e9
    assert best == pytest.approx(CHINCHILLA.optimum(1e22).params, rel=0.15)


@pytest.fixture
def trained(tmp_path):
    """Makes a run directory as train leaves it: two validations, the first before any step, and the end."""

    def make(name, *, params=None, loss=3.0, end=True, source=None, model="tiny"):
        folder = tmp_path / name
        folder.mkdir()
        config = RunConfig(model=ModelConfig(name=model))
        text = write_config(resolve(config).config if source is None else replace(config, model=source))
        (folder / "run.toml").write_text(text, encoding="utf-8")
        events = [
            {"event": "evaluated", "step": 0, "loss": 6.2},
            *({"event": "step", "step": step, "tokens_seen": 4096 * step} for step in range(1, 21)),
            {"event": "evaluated", "step": 10, "loss": 5.0},
            {"event": "evaluated", "step": 20, "loss": loss},
            *([{"event": "finished", "step": 20}] if end else []),
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events), encoding="utf-8")
        return str(folder)

    return make


def test_run_directories_are_runs(trained, table, tmp_path, capsys):
    rows = "\n".join(f"{run.params},{run.final.tokens},{run.final.loss}" for run in isoflop(CHINCHILLA))
    out = tmp_path / "out.json"
    argv = ["scaling", trained("one"), table("params,tokens,loss\n" + rows), "--resamples", "0", "--json", str(out)]
    assert main(argv) == 0
    run = json.loads(out.read_text(encoding="utf-8"))["runs"][0]
    assert run["params"] == non_embedding_parameters(SHAPES["tiny"])
    assert [(p["tokens"], p["loss"]) for p in run["points"]] == [(40960, 5.0), (81920, 3.0)]


GOOD = "1e7,1e9,3.5\n1e7,4e9,3.3\n1e8,1e9,3.1\n1e8,4e9,2.9\n1e9,2e9,2.8\n1e9,9e9,2.6\n"


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        ("params,token,loss\n" + GOOD, [], "has no column 'tokens'; is it 'token'? Its first line must name params"),
        ("", [], "has no column 'params'. Its first line must name params, tokens, loss."),
        ("params,tokens,loss\n1e7,1e9,-3\n", [], "line 2: loss = -3 must be above 0 and finite; mend or drop"),
        ("params,tokens,loss\n1e7,1e9,nan\n", [], "line 2: loss = nan must be above 0 and finite"),
        ("params,tokens,loss\n1e7,1e9,3\n1e7,1B,3\n", [], "line 3: tokens = '1B' is no number; write it as 70000"),
        ("params,tokens,loss\n0.007,1e9,3\n", [], "params = 0.007 is no count; write it in units of one, 7e9 for"),
        ("params,tokens,loss\n1e7,1e9\n", [], "line 2: loss = '' is no number"),
        ("run,params,tokens,loss\na,1e7,1e9,3\na,2e7,2e9,3\n", [], "run 'a' has params = 2e+07, and 1e+07 before"),
        ("run,params,tokens,loss\na,1e7,1e9,3\na,1e7,1e9,2\n", [], "run 'a' has two losses after 1e+09 tokens"),
        ("params,tokens,loss\n1e7,1e9,3\n1e8,2e9,2\n", [], "2 runs are too few for a law of size and tokens; give at"),
        (
            "params,tokens,loss\n" + "".join(f"1e8,{d}e9,3.{9 - d}\n" for d in range(1, 9)),
            [],
            "params of the runs has 1 values from 1e+08 to 1e+08; a law needs 3 that span a factor of 2: train models",
        ),
        (
            "params,tokens,loss\n" + "".join(f"{n}e8,1e9,3.{9 - n}\n" for n in range(1, 9)),
            [],
            "tokens of the runs has 1 values from 1e+09 to 1e+09; a law needs 3",
        ),
        (GOOD, ["--budget-flop", "1e21"], "unknown flag --budget-flop; did you mean '--budget-flops'?"),
        (GOOD, ["--budget", "10000xH100-days"], "--budget = '10000xH100-days' is not in hours of a chip; write HOURSx"),
        (GOOD, ["--budget", "1e21"], "is not in hours of a chip; write HOURSxCHIP-hours, as 10000xH100-hours, or give"),
        (GOOD, ["--budget", "10.0.0xH100-hours"], "10.0.0 is no number; write HOURSxCHIP-hours"),
        (GOOD, ["--budget", "0xH100-hours"], "0 hours must be above 0"),
        (GOOD, ["--budget", "10xH10-hours"], "--budget = 'H10' is not in the catalogue"),
        (GOOD, ["--budget", "10xH100-hours", "--budget-flops", "1e21"], "are two budgets; give one."),
        (GOOD, ["--budget-flops", "-1e21"], "--budget-flops = -1e+21 must be a count of at least 1"),
        (GOOD, ["--budget-flops", "1e21 FLOPs"], "--budget-flops = '1e21 FLOPs' is not valid; it must be a number."),
        (GOOD, ["--budget", "10xH100-hours", "--mfu", "40"], "--mfu = 40 must be a share of the peak above 0, at most"),
        (GOOD, ["--params", "7e9"], "--params asks for a loss, which depends on --tokens too; give both."),
        (GOOD, ["--resamples", "-1"], "--resamples = -1 must be at least 0."),
        (GOOD, ["--points", "last"], "--points = 'last' is not valid; it must be one of 'final', 'all'."),
        (GOOD, ["--plot", "none/law.svg"], "--plot = 'none/law.svg': the folder none is not there; make it first."),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, argv, message, table, capsys):
    text = text if text != GOOD else "params,tokens,loss\n" + GOOD
    assert main(["scaling", table(text), *argv]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_paths_and_directories_that_are_wrong_are_said_in_one_line(trained, tmp_path, capsys):
    twice = trained("twice")
    empty = tmp_path / "empty"
    empty.mkdir()
    own = ModelConfig(source="recipes/own_model.py", vocab=512)
    for words, message in (
        ([], "name the runs first, then any flags: superstep scaling runs.csv --budget-flops 1e21."),
        (["none.csv"], "'none.csv' is not there; name a CSV file of runs, or directories that train wrote."),
        ([twice, twice], "is named twice; a run counts once."),
        ([str(empty)], "is no run directory: it lacks run.toml or metrics.jsonl."),
        ([trained("short", end=False)], "has not finished, so its last loss is not its final one"),
        ([trained("nan", loss=None)], "diverged: its loss after 81920 tokens is no number; leave it out."),
        ([trained("moe", model="demo-moe")], "is a mixture of experts, which has a size in all and one a token"),
        ([trained("own", source=own)], "trains the model of recipes/own_model.py, whose embeddings are not known"),
    ):
        assert main(["scaling", *words]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("text", ["10000xH100-hours", "10,000 H100 hours", "1e4xh100-hours", "1e4xH100-SXM-hour"])
def test_a_budget_is_read_as_people_write_it(text):
    budget = device_budget(text, 0.4)
    assert budget.device_s == 3.6e7
    assert budget.throughput(1e9) == pytest.approx(0.4 * 989.5e12, rel=1e-3)


def test_every_fit_has_its_choice():
    found = study(isoflop(CHINCHILLA, budgets=3), resamples=0, seed=0)
    assert set(choices(found, 1e21)) == {"hoffmann", "kaplan", "isoflop"}
    assert choices(found, 1e21)["isoflop"].loss is None

"""superstep scaling: what it prints, writes and draws, which runs it reads, and how it refuses."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from drawn_runs import CHINCHILLA, ROOT, curves, isoflop
from superstep.cli.main import main
from superstep.cli.scaling.scaling import device_budget
from superstep.plan.config import ModelConfig, RunConfig
from superstep.plan.config_io import write_config
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.resolution.resolve import resolve
from superstep.scaling.model_sizes import non_embedding_parameters
from superstep.scaling.runs import read_csv

EXAMPLE = ROOT / "docs" / "howto" / "fit-a-scaling-law.csv"


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


def test_runs_that_hardly_tell_are_warned_of(table, capsys):
    runs = isoflop(CHINCHILLA, noise=0.05, budgets=3, sizes=4)
    rows = "\n".join(f"{run.params},{run.final.tokens},{run.final.loss}" for run in runs)
    assert main(["scaling", table("params,tokens,loss\n" + rows), "--resamples", "10"]) == 0
    assert (
        "warning: the runs do not determine a, the exponent of the best size: it may be anywhere from"
        in capsys.readouterr().out
    )


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
        ("params,tokens,loss\n1e7,1e9,3\n1e7,1B,3\n", [], "line 3: tokens = '1B' is not a number; write it as 70000"),
        ("params,tokens,loss\n0.007,1e9,3\n", [], "params = 0.007 is no count; write it in units of one, 7e9 for"),
        ("params,tokens,loss\n1e7,1e9\n", [], "line 2: loss = '' is not a number"),
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
        (GOOD, ["--budget", "10.0.0xH100-hours"], "10.0.0 is not a number; write HOURSxCHIP-hours"),
        (GOOD, ["--budget", "0xH100-hours"], "0 hours must be above 0"),
        (GOOD, ["--budget", "10xH10-hours"], "--budget = 'H10' is not in the catalogue"),
        (GOOD, ["--budget", "10xH100-hours", "--budget-flops", "1e21"], "exclude each other; give one."),
        (GOOD, ["--budget-flops", "-1e21"], "--budget-flops = -1e+21 must be a count of at least 1"),
        (GOOD, ["--budget-flops", "1e21 FLOPs"], "--budget-flops = '1e21 FLOPs' is not valid; it must be a number."),
        (GOOD, ["--budget", "10xH100-hours", "--mfu", "40"], "--mfu = 40 must be a share of the peak above 0, at most"),
        (GOOD, ["--params", "7e9"], "--params predicts a loss, which also depends on --tokens; give both."),
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
        ([], "no runs are given; name them first, then any flags: superstep scaling runs.csv --budget-flops 1e21."),
        (["none.csv"], "'none.csv' is not there; name a CSV file of runs, or run directories."),
        ([twice, twice], "is named twice; name each run once."),
        ([str(empty)], "is not a run directory: it lacks run.toml or metrics.jsonl."),
        ([trained("short", end=False)], "has not finished, so its last loss is not its final one"),
        ([trained("nan", loss=None)], "diverged: its loss after 81920 tokens is not a number; leave it out."),
        (
            [trained("moe", model="demo-moe")],
            "is a mixture of experts, which has a total size and a size for each token",
        ),
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

"""superstep view --router: where tokens went, as a picture and as a table; and the measures that it shows."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superstep.cli.main import main
from superstep.observe.events import RouterStats
from superstep.observe.jsonl import JsonLines
from superstep.observe.router import ASCII, COLOURS, GUTTER, SHADES, RouterReport, draw_routers
from superstep.observe.router_balance import busiest, entropy, share_dropped
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig
from superstep.plan.config_io import write_config
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.text import write_program

# Two layers of four experts: the first finds its balance, the second never had a doubt.
REPORTS = [
    RouterReport(
        first=1, last=10, chosen=[[240, 120, 40, 0], [100, 100, 100, 100]], dropped=[[60, 0, 0, 0], [0, 0, 0, 0]]
    ),
    RouterReport(
        first=11, last=20, chosen=[[150, 100, 90, 60], [100, 100, 100, 100]], dropped=[[4, 0, 0, 0], [0, 0, 0, 0]]
    ),
]


def drawn(reports=REPORTS, layers=(0, 1), width=40, ink=SHADES):
    return draw_routers(reports, layers, width=width, ink=ink)


def test_two_reports_of_four_experts():
    assert drawn(layers=[0]).splitlines() == [
        "layer 0",
        "  expert 0 │██████████████▓▓▓▓▓▓▓▓▓▓▓▓▓▓",
        "  expert 1 │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒",
        "  expert 2 │··············▒▒▒▒▒▒▒▒▒▒▒▒▒▒",
        "  expert 3 │··············░░░░░░░░░░░░░░",
        "           └┬───────────┬───────────┬───",
        "            1           9 step",
        "",
        "   ·· under 1/2 of the even load",
        "   ░░ under 4/5   ▒▒ about even",
        "   ▓▓ over 5/4   ██ over 2",
        "",
        "steps 1 to 10, then 11 to 20:",
        "  layer    busiest / mean      entropy of 2           dropped",
        "      0     2.40     1.50    1.295    1.925    15.0%     1.0%",
    ]


def test_plain_ink_is_ascii_and_says_the_same():
    plain = drawn(ink=ASCII)
    assert plain.isascii()
    assert plain.translate(str.maketrans(".-=*#", "·░▒▓█")).count("█") == drawn().count("█")
    assert "  expert 0 |##############**************" in plain


def test_coloured_ink_has_the_same_columns():
    lines = re.sub(r"\x1b\[[\d;]*m", "", drawn(ink=COLOURS)).splitlines()
    assert [len(line) for line in lines] == [len(line) for line in drawn().splitlines()]
    assert "\x1b[48;5;166m" + " " * 14 + "\x1b[0m\x1b[48;5;137m" + " " * 14 in drawn(ink=COLOURS)


def test_only_the_layers_that_are_asked_for():
    assert "layer 0" not in drawn(layers=[1])
    assert drawn(layers=[1]).splitlines()[-1].split()[0] == "1"
    assert drawn().count("expert 3") == 2


def test_a_column_adds_up_its_reports():
    # Each half of the reports sends all tokens to one expert; a column holds as many of each.
    extremes = [
        RouterReport(first=step, last=step, chosen=[[100, 0] if step % 2 else [0, 100]], dropped=[[0, 0]])
        for step in range(1, 2 * (40 - GUTTER) + 1)
    ]
    rows = [line for line in drawn(extremes, layers=[0]).splitlines() if "│" in line]
    assert {row.split("│")[1] for row in rows} == {"▒" * (40 - GUTTER)}
    axis = drawn(extremes, layers=[0]).splitlines()[4]
    assert axis.split() == ["1", "25", "step"]


@given(st.integers(1, 300), st.integers(1, 150))
def test_every_row_is_as_wide_as_asked(count, width):
    reports = [RouterReport(first=s, last=s, chosen=[[3, s]], dropped=[[0, 0]]) for s in range(1, count + 1)]
    lines = drawn(reports, layers=[0], width=width).splitlines()
    assert {len(line) for line in lines if "│" in line or "└" in line} == {max(width, 40)}
    steps = [int(word) for word in lines[4].split()[:-1]]
    assert steps[0] == 1
    assert steps == sorted(steps)
    assert steps[-1] <= count


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=16).filter(any))
def test_measures_have_their_bounds(chosen):
    assert 1 <= busiest(chosen) <= len(chosen)
    assert -1e-9 <= entropy(chosen) <= math.log2(len(chosen)) + 1e-9


def test_measures_of_known_loads():
    assert busiest([5, 5, 5, 5]) == 1
    assert busiest([9, 0, 0]) == 3
    assert entropy([7, 7, 7, 7]) == 2
    assert entropy([9, 0]) == 0
    assert entropy([2, 1, 1]) == 1.5
    assert share_dropped([6, 4], [3, 0]) == 0.3


# The command.


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A run with two reports."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return folder_of(tmp_path / "run", ModelConfig(name="tiny", experts=4, router="switch"), REPORTS)


def folder_of(folder, model, reports):
    run = resolve(RunConfig(model=model, plan=PlanConfig(dp=1)))
    folder.mkdir()
    (folder / "run.toml").write_text(write_config(run.config), encoding="utf-8")
    (folder / "program.txt").write_text(write_program(compile_step(run.plan)), encoding="utf-8")
    sink = JsonLines(folder / "metrics.jsonl")
    for r in reports:
        counts = {"chosen": tuple(map(tuple, r.chosen)), "dropped": tuple(map(tuple, r.dropped))}
        sink.write(RouterStats(step=r.last, steps=r.last - r.first + 1, balance=(1.0, 1.0), z=(0.0, 0.0), **counts))
    sink.close()
    return folder


def test_a_run_shows_what_it_reported(run_folder, capsys):
    assert main(["view", str(run_folder), "--router"]) == 0
    out = capsys.readouterr().out
    assert out == f"where the tokens of {run_folder} went, in steps 1 to 20\n\n{drawn(width=60)}"
    assert main(["view", str(run_folder), "--router", "--layer", "1", "--width", "50"]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{drawn(layers=[1], width=50)}")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_it_plain_gets_ascii(run_folder, monkeypatch, name, value, capsys):
    monkeypatch.setenv(name, value)
    assert main(["view", str(run_folder), "--router"]) == 0
    assert capsys.readouterr().out.endswith(drawn(width=60, ink=ASCII))


def refused(argv, capsys):
    assert main(["view", *map(str, argv)]) == 2
    return capsys.readouterr().err


def test_a_run_without_experts_is_refused(tmp_path, capsys):
    folder = folder_of(tmp_path / "dense", ModelConfig(name="tiny"), [])
    error = refused([folder, "--router"], capsys)
    assert "dense' has no experts and so no router" in error
    assert "superstep train recipes/moe.toml" in error


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_has_not_reported_says_when_it_will(tmp_path, is_there, capsys):
    folder = folder_of(tmp_path / "new", ModelConfig(name="tiny", experts=4), [])
    if not is_there:
        (folder / "metrics.jsonl").unlink()
    assert "has no report of its routers yet: the run writes one every 10 steps" in refused(
        [folder, "--router"], capsys
    )


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_is_refused(run_folder, layer, capsys):
    error = refused([run_folder, "--router", f"--layer={layer}"], capsys)
    assert f"--layer {layer}: the layers of" in error
    assert "are 0 to 1; name one of them" in error


def test_what_is_no_run_has_no_routers_to_show(run_folder, tmp_path, capsys):
    assert "name the folder of a run" in refused(["--router"], capsys)
    assert "name the folder of a run" in refused([run_folder / "run.toml", "--router"], capsys)
    (tmp_path / "empty").mkdir()
    assert "is not a run directory" in refused([tmp_path / "empty", "--router"], capsys)


def test_a_layer_needs_the_picture_of_routers(run_folder, capsys):
    assert "add --router" in refused([run_folder, "--layer", "1"], capsys)
    error = refused([run_folder, "--router", "--program"], capsys)
    assert "--program and --router exclude each other; leave one of them out." in error

"""Calibration finds the rates of the machine that recorded a step, as far as the step tells them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from planning import problem_of
from superstep.cli.main import main
from superstep.cli.plan.plan_text import calibration_text
from superstep.cost.closed.efficiency import FITTED
from superstep.cost.program.time.instruction_seconds import instruction_seconds
from superstep.cost.program.time.simulate import simulate
from superstep.hardware.cluster_file import cluster
from superstep.plan.config import PlanConfig
from superstep.plan.config_io import write_config
from superstep.plan.resolution.resolve import resolve
from superstep.planner.calibration.calibrate import calibrate
from superstep.planner.calibration.calibrate_observation import guide
from superstep.planner.calibration.published_row import after_published, step_slopes
from superstep.planner.closed_form_seconds import catalogue_seconds
from superstep.planner.plan_columns import plans_of, run_config
from superstep.planner.price import pricing_of
from superstep.planner.search_problem import SearchProblem
from superstep.planner.simulate_best import simulate_plan
from superstep.program.compile import compile_step
from superstep.program.text import write_program

TRUE = {"products.ampere": 0.4, "memory": 0.6, "launch_s": 5e-5, "link": 0.4}
PROBLEM = problem_of("llama3.2-1b", chips=4, batch=16, sequence=1024)
LAYOUT = PlanConfig(dp=2, tp=2, zero=2, microbatch=2)


def priced(problem: SearchProblem, efficiency):
    """The run's program and its step on a machine of these constants."""
    run = resolve(run_config(LAYOUT, problem))
    program = compile_step(run.plan)
    ruled = SearchProblem(
        base=problem.base, cluster=problem.cluster, compute="bf16", memory_bytes=0.0, efficiency=efficiency
    )
    return run, program, pricing_of(ruled)


@pytest.fixture(scope="module")
def recorded():
    run, program, pricing = priced(PROBLEM, FITTED.with_changes(TRUE))
    return (
        run,
        simulate(program, instruction_seconds(run, program, catalogue_seconds(run, plans_of(run).layout, pricing))),
        pricing,
    )


def test_the_layout_of_a_run_is_that_of_the_space():
    run, _, _ = priced(PROBLEM, FITTED)
    plans = plans_of(run)
    assert plans.plan_config(0, PROBLEM) == run.config.plan
    assert plans.layout.shards[0] == run.plan.mesh.shards("dense")


def test_a_recorded_step_is_predicted_after_it_was_seen(recorded):
    run, timeline, pricing = recorded
    found = calibrate(run, timeline, PROBLEM.cluster, FITTED)
    assert found.error_before > 0.3
    assert found.error_after < 0.02
    _, program, fitted = priced(PROBLEM, found.efficiency)
    layout = plans_of(run).layout
    steps = [float(simulate_plan(run, program, layout, each).step_s) for each in (pricing, fitted)]
    assert steps[1] == pytest.approx(steps[0], rel=0.02)
    changed = {each.name: each.after for each in found.changes}
    assert changed["products.ampere"] == pytest.approx(TRUE["products.ampere"], rel=0.1)


def test_what_a_step_does_not_tell_stays(recorded):
    """Four chips of one node know nothing of the network."""
    run, timeline, _ = recorded
    found = calibrate(run, timeline, PROBLEM.cluster, FITTED)
    assert "network" not in {each.name for each in found.changes}
    assert found.efficiency["network"] == FITTED["network"]


def test_a_step_as_predicted_changes_nothing():
    run, program, pricing = priced(PROBLEM, FITTED)
    timeline = simulate(
        program, instruction_seconds(run, program, catalogue_seconds(run, plans_of(run).layout, pricing))
    )
    found = calibrate(run, timeline, PROBLEM.cluster, FITTED)
    assert found.changes == ()
    assert np.isclose(found.error_after, 0, atol=1e-6)


@pytest.fixture
def folder(tmp_path, recorded):
    run, timeline, _ = recorded
    (tmp_path / "run.toml").write_text(write_config(run.config), encoding="utf-8")
    (tmp_path / "program.txt").write_text(write_program(timeline.program), encoding="utf-8")
    ranks = [[[e.index, e.start_s, e.end_s] for e in timeline.of(rank)] for rank in range(timeline.program.pp)]
    (tmp_path / "trace.json").write_text(json.dumps({"step": 7, "ranks": ranks}), encoding="utf-8")
    return tmp_path


def test_a_run_calibrates_the_search(folder, capsys):
    argv = ["plan", "llama3.2-1b", "--cluster", "8xA100", "--sequence", "1024", "--global-batch", "32", "--top", "1"]
    steps = []
    for name, more in {"plain": [], "calibrated": ["--calibrate", str(folder)]}.items():
        assert main([*argv, *more, "--json", str(folder / name)]) == 0
        told = json.loads((folder / name).read_text(encoding="utf-8"))
        steps.append(told["best"][0]["figures"]["step_s"])
    assert steps[1] > 1.3 * steps[0]
    text = capsys.readouterr().out
    assert "Calibrated on" in text
    assert "products.ampere" in text


@pytest.mark.parametrize(("missing", "words"), [("run.toml", "name the folder of a run"), ("trace.json", "checkpoint")])
def test_a_run_without_its_record_is_refused(folder, missing, words, capsys):
    (folder / missing).unlink()
    assert main(["plan", "demo", "--cluster", "8xA100", "--calibrate", str(folder)]) == 2
    err = capsys.readouterr().err
    assert missing in err
    assert words in err


def test_a_step_of_other_chips_is_told():
    slow = FITTED.with_changes({"memory": FITTED["memory"] / 1000, "link": FITTED["link"] / 1000})
    run, program, pricing = priced(PROBLEM, slow)
    timeline = simulate(
        program, instruction_seconds(run, program, catalogue_seconds(run, plans_of(run).layout, pricing))
    )
    found = calibrate(run, timeline, PROBLEM.cluster, FITTED)
    assert "memory" in {each.name for each in found.foreign}
    assert not found.is_believed
    assert "Not used: memory" in calibration_text(found, "runs/first")


def test_a_step_of_such_chips_is_believed(recorded):
    run, timeline, _ = recorded
    found = calibrate(run, timeline, PROBLEM.cluster, FITTED)
    assert found.is_believed
    assert "such chips" not in calibration_text(found, "runs/first")


def test_a_model_of_ones_own_calibrates_nothing(folder, capsys):
    (folder / "run.toml").write_text("[model]\nsource = 'own.py'\nvocab = 64\n", encoding="utf-8")
    assert main(["plan", "demo", "--cluster", "8xA100", "--calibrate", str(folder)]) == 2
    assert "not predicted" in capsys.readouterr().err


ROW = """
[published]
step_s = {step_s}
cluster = "64xA100"
software = "Megatron-LM"
year = 2022.3
[model]
name = "llama3.2-1b"
[data]
sequence_tokens = 2048
[train]
batch_sequences = 256
[plan]
dp = 32
tp = 2
zero = 1
microbatch = 2
"""


def predicted_row(tmp_path):
    """The seconds that the row's step is predicted to take, and a file that says so."""
    path = tmp_path / "row.toml"
    path.write_text(ROW.format(step_s=1.0), encoding="utf-8")
    return after_published(path, cluster("64xA100"), guide())[1], path


def test_a_published_step_moves_the_constants_until_it_is_nearly_predicted(tmp_path):
    took, path = predicted_row(tmp_path)
    path.write_text(ROW.format(step_s=took * 1.25), encoding="utf-8")
    first = guide()
    after, ratio = after_published(path, cluster("64xA100"), first)
    assert ratio == pytest.approx(1 / 1.25)
    again, left = after_published(path, cluster("64xA100"), after)
    # Seen again it is off by what one step's noise leaves of the deviation.
    assert abs(np.log(left)) < 0.5 * abs(np.log(ratio))
    moved = {name for name, value in after.efficiency.values.items() if abs(value / FITTED[name] - 1) > 1e-3}
    assert "products.ampere" in moved
    assert not {name for name in moved if "hopper" in name or "blackwell" in name or name.startswith("flash")}
    assert np.all(np.diag(again.covariance) <= np.diag(after.covariance) + 1e-15)
    assert np.all(np.diag(after.covariance) <= np.diag(first.covariance) + 1e-15)


def test_an_interval_is_narrower_for_plans_that_depend_on_what_was_seen(tmp_path):
    took, path = predicted_row(tmp_path)
    path.write_text(ROW.format(step_s=took), encoding="utf-8")
    after, _ = after_published(path, cluster("64xA100"), guide())
    alike, other = (
        resolve(run_config(PlanConfig(dp=64, zero=1, microbatch=2), problem_of(
            "llama3.2-1b", chips=64, batch=256, sequence=2048, chip=chip)))
        for chip in ("A100", "H100")
    )  # fmt: skip
    assert guide().remaining_width(np.ones(len(FITTED.values))) == 1
    mine = after.remaining_width(step_slopes(alike, cluster("64xA100"), after.efficiency))
    theirs = after.remaining_width(step_slopes(other, cluster("64xH100"), after.efficiency))
    assert 0.2 < mine < theirs <= 1
    # A step that came out as predicted moves nothing.
    assert after.efficiency.values == pytest.approx(FITTED.values)


def test_a_measured_rate_is_taken_and_known_from_then_on():
    after = guide().after_rate("products.ampere", 0.6)
    assert after.efficiency["products.ampere"] == pytest.approx(0.6, rel=0.2)
    sure = replace(guide(), covariance=guide().before * 100).after_rate("products.ampere", 0.6)
    assert sure.efficiency["products.ampere"] == pytest.approx(0.6, rel=0.01)
    assert {n for n, v in after.efficiency.values.items() if v != FITTED[n]} == {"products.ampere"}


@pytest.mark.long
def test_the_planner_calibrates_on_rows_and_machines_and_says_how_much_narrower(tmp_path, capsys):
    took, path = predicted_row(tmp_path)
    path.write_text(ROW.format(step_s=took * 1.2), encoding="utf-8")
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE, encoding="utf-8")
    argv = ["plan", "llama3.2-1b", "--cluster", "64xA100", "--global-batch", "256", "--sequence", "2048", "--top", "1"]
    steps = {}
    for name, more in {"plain": [], "row": [str(path)], "both": [str(path), str(machine)]}.items():
        calibrate = ["--calibrate", *more] if more else []
        assert main([*argv, *calibrate, "--json", str(tmp_path / name)]) == 0
        told = json.loads((tmp_path / name).read_text(encoding="utf-8"))["best"][0]["figures"]
        low, high = told["step_interval_s"]
        steps[name] = told["step_s"], np.log(high / low)
    assert steps["row"][0] > 1.02 * steps["plain"][0]
    assert steps["row"][1] < 0.9 * steps["plain"][1]
    assert steps["both"][1] < steps["row"][1]
    text = capsys.readouterr().out
    assert "its step was predicted 17% shorter than it was" in text
    assert "a measured machine" in text
    assert "Calibration narrows the range of plan 1's step to " in text


MACHINE = """
chips = 8
[chip]
base = "A100"
products = [{rate = "bf16", rows = 8192, width = 8192, inner = 8192, flops_per_s = 250e12}]
copies = [{bytes = 1000000000, bytes_per_s = 1.8e12}]
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_s = {step_s}": "step_s = 0"}, "published.step_s = 0.0 must be above 0."),
        ({"step_s = {step_s}": "seconds = 3"}, "unknown key 'published.seconds'"),
        ({"64xA100": "32xA100"}, "has 32 chips, and the plan 64; change one of them."),
        ({"{step_s}": "1e6"}, None),
    ],
)
def test_a_published_step_with_an_error_is_refused_and_a_strange_one_not_used(change, words, tmp_path, capsys):
    text = ROW
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "row.toml"
    path.write_text(text.format(step_s=1.0), encoding="utf-8")
    argv = ["plan", "llama3.2-1b", "--cluster", "64xA100", "--global-batch", "256", "--sequence", "2048", "--top", "1"]
    status = main([*argv, "--calibrate", str(path)])
    said = capsys.readouterr()
    if words is None:
        assert status == 0
        assert "Not used: " in said.out
        assert "100% shorter than it was" in said.out
    else:
        assert status == 2
        assert words in said.err


def test_a_machine_of_another_generation_or_without_measurements_calibrates_nothing(tmp_path, capsys):
    machine = tmp_path / "machine.toml"
    for text, words in (
        (MACHINE.replace('"A100"', '"H100"'), "of another generation"),
        ('chips = 8\nchip = "A100"\n', "no product, copy or gather of A100-80GB-SXM was measured"),
    ):
        machine.write_text(text, encoding="utf-8")
        assert main(["plan", "demo", "--cluster", "8xA100", "--calibrate", str(machine)]) == 2
        assert words in capsys.readouterr().err

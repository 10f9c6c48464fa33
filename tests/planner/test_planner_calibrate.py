"""Calibration finds the rates of the machine that recorded a step, as far as the step tells them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from planning import problem_of
from superstep.cli.main import main
from superstep.cli.plan.text import calibration_text
from superstep.cost.closed.efficiency import FITTED
from superstep.cost.program.instruction_seconds import instruction_seconds
from superstep.cost.program.simulate import simulate
from superstep.plan.config import PlanConfig
from superstep.plan.resolve import resolve
from superstep.plan.toml import write_config
from superstep.planner.calibrate import calibrated
from superstep.planner.catalogue import catalogued
from superstep.planner.plans import plans_of, run_config
from superstep.planner.price import pricing_of
from superstep.planner.search_problem import Problem
from superstep.planner.verify import simulated
from superstep.program.compile import compile_step
from superstep.program.text import write_program

TRUE = {"products.ampere": 0.4, "memory": 0.6, "launch_s": 5e-5, "link": 0.4}
PROBLEM = problem_of("llama3.2-1b", chips=4, batch=16, sequence=1024)
LAYOUT = PlanConfig(dp=2, tp=2, zero=2, microbatch=2)


def priced(problem: Problem, efficiency):
    """The run's program and its step on a machine of these constants."""
    run = resolve(run_config(LAYOUT, problem))
    program = compile_step(run.plan)
    ruled = Problem(base=problem.base, cluster=problem.cluster, compute="bf16", memory_bytes=0.0, efficiency=efficiency)
    return run, program, pricing_of(ruled)


@pytest.fixture(scope="module")
def recorded():
    run, program, pricing = priced(PROBLEM, FITTED.changed(TRUE))
    return (
        run,
        simulate(program, instruction_seconds(run, program, catalogued(run, plans_of(run).layout, pricing))),
        pricing,
    )


def test_the_layout_of_a_run_is_that_of_the_space():
    run, _, _ = priced(PROBLEM, FITTED)
    plans = plans_of(run)
    assert plans.plan_config(0, PROBLEM) == run.config.plan
    assert plans.layout.shards[0] == run.plan.mesh.shards("dense")


def test_a_recorded_step_is_predicted_after_it_was_seen(recorded):
    run, timeline, pricing = recorded
    found = calibrated(run, timeline, PROBLEM.cluster, FITTED)
    assert found.error_before > 0.3
    assert found.error_after < 0.02
    _, program, fitted = priced(PROBLEM, found.efficiency)
    layout = plans_of(run).layout
    steps = [float(simulated(run, program, layout, each).step_s) for each in (pricing, fitted)]
    assert steps[1] == pytest.approx(steps[0], rel=0.02)
    changed = {each.name: each.after for each in found.changes}
    assert changed["products.ampere"] == pytest.approx(TRUE["products.ampere"], rel=0.1)


def test_what_a_step_does_not_tell_stays(recorded):
    """Four chips of one node know nothing of the network."""
    run, timeline, _ = recorded
    found = calibrated(run, timeline, PROBLEM.cluster, FITTED)
    assert "network" not in {each.name for each in found.changes}
    assert found.efficiency["network"] == FITTED["network"]


def test_a_step_as_predicted_changes_nothing():
    run, program, pricing = priced(PROBLEM, FITTED)
    timeline = simulate(program, instruction_seconds(run, program, catalogued(run, plans_of(run).layout, pricing)))
    found = calibrated(run, timeline, PROBLEM.cluster, FITTED)
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
    slow = FITTED.changed({"memory": FITTED["memory"] / 1000, "link": FITTED["link"] / 1000})
    run, program, pricing = priced(PROBLEM, slow)
    timeline = simulate(program, instruction_seconds(run, program, catalogued(run, plans_of(run).layout, pricing)))
    found = calibrated(run, timeline, PROBLEM.cluster, FITTED)
    assert "memory" in {each.name for each in found.foreign}
    assert not found.is_believed
    assert "Not used: memory" in calibration_text(found, "runs/first")


def test_a_step_of_such_chips_is_believed(recorded):
    run, timeline, _ = recorded
    found = calibrated(run, timeline, PROBLEM.cluster, FITTED)
    assert found.is_believed
    assert "such chips" not in calibration_text(found, "runs/first")


def test_a_model_of_ones_own_calibrates_nothing(folder, capsys):
    (folder / "run.toml").write_text("[model]\nsource = 'own.py'\nvocab = 64\n", encoding="utf-8")
    assert main(["plan", "demo", "--cluster", "8xA100", "--calibrate", str(folder)]) == 2
    assert "not predicted" in capsys.readouterr().err

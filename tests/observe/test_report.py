"""The report of runs: what is taken from their metrics, and when a difference in loss is said to be more than noise."""

from __future__ import annotations

import hashlib
import random
import re
from importlib.resources import files

import pytest

import step_pages
import told_runs
from superstep.observe.page.compare import LEAST_STEPS, compare, mean_and_error
from superstep.observe.page.report import (
    COLUMNS,
    MOST_POINTS,
    ReportedRun,
    report_page,
    run_value,
    split_step,
    thin_steps,
)


def test_a_change_of_layout_is_marked_after_the_step_before_it():
    lines = list(told_runs.lines(steps=300))
    started = lines[0]
    half = next(k for k, line in enumerate(lines) if line["event"] == "step" and line["step"] == 150)
    assert run_value(ReportedRun(name="a", lines=lines))["layouts"] == []
    same = [*lines[: half + 1], started, *lines[half + 1 :]]
    assert run_value(ReportedRun(name="a", lines=same))["layouts"] == []
    other = [*lines[: half + 1], started | {"plan": "dp=1 m=1x4"}, *lines[half + 1 :]]
    assert run_value(ReportedRun(name="a", lines=other))["layouts"] == [(150, "dp=1 m=1x4")]


def test_a_run_is_told_as_its_metrics_have_it():
    lines = list(told_runs.lines(steps=300, experts=4))
    one = step_pages.drawn(step_pages.A_RUN, is_measured=True)
    lines[0]["predicted_spent_s"] = split_step(one.timeline)
    value = run_value(ReportedRun(name="a run", lines=lines, ran=one.measured))
    steps = [line for line in lines if line["event"] == "step"]
    assert value["step"] == [line["step"] for line in steps]
    for name in COLUMNS:
        assert value["columns"][name] == [line[name] for line in steps]
    assert value["evaluated"]["step"] == [100, 200, 300]
    assert value["totals"]["validation"] == 3.75
    assert value["totals"]["checkpoints"] == 0.75
    assert value["totals"]["steps"] + value["totals"]["data"] == pytest.approx(sum(line["step_s"] for line in steps))
    # An even load is 1; one expert with all of four has 4.
    assert value["router"] == {"step": [100, 200, 300], "busiest": [[1.25] * 3, [4.0] * 3]}
    assert [kind for _, kind, _ in value["events"]] == ["started", *["validation", "saved"] * 3, "finished"]
    for name, timeline in (("ran", one.measured), ("predicted", one.timeline)):
        assert sum(value["spent"][name].values()) == pytest.approx(timeline.step_s)


def test_what_was_predicted_stands_beside_what_was_measured():
    lines = list(told_runs.lines(steps=50))
    started, steps = lines[0], [line for line in lines if line["event"] == "step"]
    started |= {
        "predicted_spent_s": {"compute": 0.1, "waits for reduce": 0.02},
        "predicted_bytes": {"parameters": 30, "activations": 19},
        "predicted_traffic_bytes": {"pp": 5, "shards": 70},
    }
    value = run_value(ReportedRun(name="a run", lines=lines))
    rows = {row[0]: row[1:] for row in value["ledger"]}
    taken_s = sorted(line["step_s"] for line in steps[2:])
    assert rows["a step"] == [0.132, (taken_s[23] + taken_s[24]) / 2, "s"]
    assert (rows[" compute"], rows[" activations"]) == ([0.1, None, "s"], [19, None, "bytes"])
    assert rows["tensors of the fullest rank"] == [49 << 20, None, "bytes"], "a process is more than its tensors"
    assert rows["the whole process of the fullest rank, torch and Python among it"] == [
        None,
        steps[-1]["memory_bytes"],
        "bytes",
    ]
    assert [axis for axis, _, _ in value["traffic"]] == ["shards", "pp"]
    assert value["spent"] == {"predicted": started["predicted_spent_s"]}
    # A GPU tells what its tensors took, and the end of a run its own median.
    started["memory"] = "allocated"
    lines[-1] |= {"peak_bytes": 40 << 20, "step_s": 0.2}
    one = step_pages.drawn(step_pages.A_RUN, is_measured=True)
    rows = {row[0]: row[1:] for row in run_value(ReportedRun(name="a", lines=lines, ran=one.measured))["ledger"]}
    assert rows["tensors of the fullest rank"] == [49 << 20, 40 << 20, "bytes"]
    assert rows["a step"][1] == 0.2
    assert rows[" compute"][1] > 0
    assert rows[" bubble"][0] is None
    # Of a run that told none of it, as those before it did, there is what it told.
    old = [{key: line[key] for key in line if not key.startswith("predicted")} for line in told_runs.lines(steps=9)]
    value = run_value(ReportedRun(name="old", lines=old))
    assert value["traffic"] == []
    assert all(predicted is None for _, predicted, _, _ in value["ledger"])


def test_reinforcement_learning_has_its_rewards_lengths_and_distances():
    lines = list(told_runs.learning(steps=2500))
    charts = dict(run_value(ReportedRun(name="rl", lines=lines))["measures"])
    ((_, steps, rewards),) = charts["Reward"]
    rolled = [line for line in lines if line["event"] == "rolled"]
    assert (steps[0], steps[-1], len(steps)) == (1, 2500, 834)
    assert rewards == [rolled[step - 1]["reward"] for step in steps]
    assert charts["Tokens of an answer"][0][2][0] == rolled[0]["drawn_tokens"] / 64
    assert charts["Distance from the reference (KL)"][0][2][-1] == rolled[-1]["measures"]["reference_kl"]
    assert {"Entropy of the policy", "Policy: ratio", "Sampled tokens a second"} <= charts.keys()
    preferred = [{"event": "measures", "step": k, "names": ["accuracy"], "values": [k / 9]} for k in range(1, 4)]
    assert run_value(ReportedRun(name="dpo", lines=preferred))["measures"] == [
        ["Loss: accuracy", [["accuracy", [1, 2, 3], [1 / 9, 2 / 9, 3 / 9]]]]
    ]


def test_a_fault_is_the_last_that_happened():
    lines = list(told_runs.lines(steps=50))
    assert lines[-1]["event"] == "finished"
    told = run_value(ReportedRun(name="a run", lines=lines[:-1], fault="rank 1: gone"))
    assert told["events"][-1] == [lines[-2]["step"], "fault", "rank 1: gone"]
    recovered = run_value(ReportedRun(name="a run", lines=lines, fault="rank 1: gone"))
    assert recovered["events"][-1][1] == "finished"


def test_a_long_run_keeps_the_highest_and_the_lowest_of_each_stretch():
    steps = [{"step": step, "loss": 3 + 0.001 * (step % 7)} for step in range(1, 50_001)]
    steps[31_000]["loss"] = 9.0
    steps[44_000]["loss"] = None
    kept = thin_steps(steps)
    assert len(kept) <= MOST_POINTS + 1
    assert {31_001, 44_001} <= {line["step"] for line in kept}
    assert kept[-1] is steps[-1], "what the run has come to"
    assert [line["step"] for line in kept] == sorted({line["step"] for line in kept})
    assert thin_steps(steps[:100]) == steps[:100]


def told(*, seed=1, worse=0.0, steps=600):
    return {
        line["step"]: line["loss"]
        for line in told_runs.lines(seed=seed, worse=worse, steps=steps)
        if line["event"] == "step"
    }


def test_runs_are_compared_step_by_step():
    same = compare(("a", "b"), ({}, {}), (told(), told()))
    assert (same.difference, same.is_noise) == (0, True)
    assert "the same losses to the bit" in same.verdict()
    noise = compare(("a", "b"), ({}, {}), (told(), told(seed=2)))
    assert noise.is_noise
    # What is the same in both drops out: 0.002 is seen under noise of 0.06.
    worse = compare(("a", "b"), ({}, {}), (told(), {s: x + 0.002 + 1e-4 * (s % 3) for s, x in told().items()}))
    assert worse.is_noise is False
    assert worse.difference == pytest.approx(0.0021, abs=1e-4)
    assert worse.steps == (301, 600)
    assert "more than noise" in worse.verdict()
    assert not compare(("a", "b"), ({}, {}), (told(), told(seed=2, worse=0.05))).is_noise


def test_too_few_steps_are_not_judged():
    few = compare(("a", "b"), ({}, {}), (told(steps=2 * LEAST_STEPS - 2), told(seed=2, worse=1)))
    assert (few.difference, few.is_noise, few.steps) == (None, None, None)
    assert f"fewer than {LEAST_STEPS} steps" in few.verdict()


def test_an_interval_has_the_mean_nineteen_times_in_twenty_though_neighbours_hang_together():
    luck, missed = random.Random(7), 0
    for _ in range(400):
        level, values = 0.0, []
        for _ in range(600):
            level = 0.8 * level + luck.gauss(0, 1)
            values.append(level)
        mean, error = mean_and_error(values)
        missed += abs(mean) > error
    assert 0.02 < missed / 400 < 0.10


def test_settings_that_differ_are_named():
    one, other = {"train.lr": 3e-3, "plan.dp": 2, "a": 1}, {"train.lr": 1e-3, "plan.dp": 2, "b": 2}
    found = compare(("a", "b"), (one, other), ({}, {}))
    assert found.settings == (("train.lr", 3e-3, 1e-3), ("a", 1, None), ("b", None, 2))


def test_a_page_holds_its_library_and_asks_for_nothing():
    hostile = "</script><script>alert(1)</script>"
    page = report_page([ReportedRun(name=hostile, lines=list(told_runs.lines(steps=50)), settings=hostile)])
    assert "uPlot" in page
    assert "alert(1)</script>" not in page
    assert not re.search(r"""<(script|link|img)[^>]+(src|href)\s*=\s*["'](?!data:)""", page)
    assert len(page) < 1_000_000


def test_libraries_of_others_are_what_their_page_says():
    vendor = files("superstep.observe.page").joinpath("vendor")
    rows = re.findall(r"^\| `(\S+)` \|.*`([0-9a-f]{64})` \|$", vendor.joinpath("README.md").read_text(), re.MULTILINE)
    names = {one.name for one in vendor.iterdir()} - {"README.md"}
    assert {name for name, _ in rows} == {name for name in names if not name.endswith("LICENSE")}
    for name, digest in rows:
        assert hashlib.sha256(vendor.joinpath(name).read_bytes()).hexdigest() == digest
    assert "uPlot.LICENSE" in names

"""superstep train, tune and measure on emulated GPUs: the CPU's numbers, and nothing left behind."""

import multiprocessing
import re

import pytest

import runs
import strict_runs
import tuned
from hurting import resumed
from superstep.cli.main import main
from superstep.cli.measure import measure
from superstep.hardware.cluster_file import read_cluster
from superstep.run import launch_ranks

pytestmark = pytest.mark.strict


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a run to train, and conversations and preferences to tune by."""
    runs.make_files(tmp_path)
    tuned.make_files(tmp_path)
    tuned.write_records(tmp_path / "pairs.jsonl", tuned.preferences(40))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_ranks, "rank", strict_runs.rank)
    return tmp_path


def run(*argv, device="cuda"):
    before = set(multiprocessing.active_children())
    status = main([*argv, "--plan.device", device])
    assert set(multiprocessing.active_children()) <= before
    return status


TRAIN = ["train", "run.toml", "--plan.dp", "2", "--plan.zero", "3", "--state.snapshot-every", "1"]


def test_a_run_has_the_cpus_losses_and_each_rank_its_own_gpu(place, monkeypatch):
    assert run(*TRAIN, "--state.dir", "gpus") == 0
    assert strict_runs.reports(place / "gpus", 2) == strict_runs.clean(2)
    monkeypatch.setattr(launch_ranks, "rank", strict_runs.measured_little.rank)
    assert run(*TRAIN, "--state.dir", "cpu", device="cpu") == 0
    strict_runs.assert_near(place / "gpus", place / "cpu")


def test_copies_of_the_state_in_a_thread_without_a_gpu_of_its_own_are_seen(place, monkeypatch):
    monkeypatch.setattr(launch_ranks, "rank", strict_runs.rank_whose_copies_choose_no_gpu)
    assert run(*TRAIN, "--train.steps", "2") == 0
    assert strict_runs.reports(place / "run", 2) == [({}, [0]), ({}, [0, 1])]


LAYOUTS = {"zero 3": ["--plan.dp", "2", "--plan.zero", "3"], "pp": ["--plan.pp", "2"]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_that_is_killed_within_a_step_changes_no_bit(place, monkeypatch, name):
    argv = ["train", "run.toml", *LAYOUTS[name], "--state.snapshot-every", "1"]
    assert run(*argv, "--state.dir", "whole") == 0
    monkeypatch.setattr(launch_ranks, "rank", strict_runs.rank_that_dies)
    assert run(*argv, "--state.dir", "hurt") == 0
    (lost,) = resumed(place / "hurt")
    assert re.match(r"rank 1, host \S+, step \d.*: the process was killed by SIGKILL", lost["lost"])
    assert strict_runs.DIES_AFTER - 1 <= lost["step"] <= strict_runs.DIES_AFTER, "rank 0 may still have been copying"
    assert lost["path"] == "", "from memory"
    assert strict_runs.steps(place / "hurt") == strict_runs.steps(place / "whole")
    assert strict_runs.reports(place / "hurt", 2) == strict_runs.clean(2)


DPO = ["tune", "dpo", "recipe.toml", "--data.corpus", "pairs.jsonl", "--train.batch-sequences", "4"]


DPO_LAYOUTS = [[], ["--plan.dp", "2", "--plan.zero", "2"], ["--plan.tp", "2"], ["--plan.pp", "2"]]


@pytest.mark.parametrize("layout", DPO_LAYOUTS, ids=str)
def test_preferences_are_learnt_as_on_the_cpu(place, monkeypatch, layout):
    argv, ranks = [*DPO, "--train.steps", "3"], 2 if layout else 1
    assert run(*argv, *layout, "--state.dir", "gpus") == 0
    assert strict_runs.reports(place / "gpus", ranks) == strict_runs.clean(ranks)
    monkeypatch.setattr(launch_ranks, "rank", strict_runs.measured_little.rank)
    assert run(*argv, "--state.dir", "cpu", device="cpu") == 0
    strict_runs.assert_near(place / "gpus", place / "cpu")


def test_a_gpu_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "measure_rank", strict_runs.measured)
    out = tmp_path / "cluster.toml"
    assert main(["measure", "--quick", "--device", "cuda", "--ranks", "2", "--dtype", "bf16", "--out", str(out)]) == 0
    cluster = read_cluster(out)
    assert {rate.name for rate in cluster.collectives} == {
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send",
    }  # fmt: skip
    assert {"product", "attention"} <= {rate.kernel for rate in cluster.chip.products}
    assert {"copy", "update"} <= {rate.kernel for rate in cluster.chip.copies}
    assert cluster.chip.launch_s > 0

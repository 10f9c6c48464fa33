"""A run of rewards goes on by itself: after a rank is lost, where state is corrupted, where a gradient is wrong.

Each comes to the bits of a run that nothing has befallen.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reinforced
from superstep.cli.main import main
from superstep.launch.ranks import World
from superstep.numerics.fixed_point import Grid
from superstep.run.console import Console
from superstep.run.rl import rl_rank as rl_ranks
from superstep.run.rl.rl_rank import rl_rank, rl_sampler
from superstep.state.object_store.store import CheckpointStore
from superstep.tune.rl.disaggregated.hub_connection import HubConnection
from superstep.tune.rl.history import read_history
from superstep.tune.rl.job import RlJob
from superstep.tune.rl.policy_trainer import PolicyTrainer
from superstep.tune.rl.rollout_log import NAME

STEPS = 5

RECIPE = f"""
[train]
steps = {STEPS}
lr = 3e-3

[plan]
dp = 2
microbatch = 2

[numerics]
exact = true

[state]
save_every = 2
existing = "resume"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe, and what runs of it come to, whose ranks sample and train in turn or apart."""
    folder = tmp_path_factory.mktemp("recovery")
    (folder / "start").mkdir()
    start = reinforced.start(folder / "start")
    (folder / "rl.toml").write_text(reinforced.RECIPE.format(start=start, environment="tasks.py") + RECIPE)
    for placement in ("shared", "apart"):
        words = ["--state.dir", str(folder / placement), "--rollout.placement", placement]
        assert main(["tune", "rl", str(folder / "rl.toml"), *words]) == 0
    return folder


def events(root: Path, name: str) -> list[dict]:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


def go(place: Path, root: Path, *flags: str, placement: str = "shared") -> None:
    """A run, which ends with the bits of the other."""
    words = ["--state.dir", str(root), "--rollout.placement", placement, *flags]
    assert main(["tune", "rl", str(place / "rl.toml"), *words]) == 0
    require_same(root, place / placement)
    losses = [{line["step"]: line["loss"] for line in events(each, "step")} for each in (root, place / placement)]
    assert losses[0] == losses[1]


def require_same(root: Path, other: Path) -> None:
    ours, theirs = reinforced.weights(root), reinforced.weights(other)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def _before_step(world: World, job: RlJob, step: int, do: Callable[[PolicyTrainer], None], console: Console) -> bool:
    """The run of a rank, where rank 1 does something before a step, once."""
    inner, once = PolicyTrainer.step, job.folder.root.with_suffix(".once")

    def taken(self, *args, **rest):
        if world.rank == 1 and self.position.step == step - 1 and not once.exists():
            once.touch()
            do(self)
        return inner(self, *args, **rest)

    PolicyTrainer.step = taken
    return rl_rank(world, job, console)


def _killed(world: World, job: RlJob, console: Console) -> bool:
    return _before_step(world, job, 4, lambda trainer: os.kill(os.getpid(), signal.SIGKILL), console)


def _flipped(world: World, job: RlJob, console: Console) -> bool:
    def flip(trainer: PolicyTrainer) -> None:
        piece = next(piece for piece in trainer.pieces(("weight",)) if piece.values.numel())
        piece.values.view(torch.int32)[1] ^= 1 << 20

    return _before_step(world, job, 4, flip, console)


def _added_wrongly(world: World, job: RlJob, console: Console) -> bool:
    put, wrong = Grid.put_, []

    def broken(self, values):
        found = put(self, values)
        if wrong and self.name.startswith("the gradient of"):
            wrong.clear()
            found.view(-1)[0] *= 2
        return found

    Grid.put_ = broken
    return _before_step(world, job, 4, lambda trainer: wrong.append(True), console)


@pytest.mark.multiproc
@pytest.mark.parametrize("placement", ["shared", "apart"])
def test_a_trainers_rank_that_is_killed_costs_one_step_at_most_and_no_bit(place, tmp_path, monkeypatch, placement):
    monkeypatch.setattr(rl_ranks, "rl_rank", _killed)
    root = tmp_path / "run"
    go(place, root, "--state.snapshot_every", "1", "--state.save_every", "100", placement=placement)
    (resumed,) = events(root, "resumed")
    assert "SIGKILL" in resumed["lost"]
    assert resumed["step"] == 2, "steps 3 and 4 were begun; that of step 2 is the newest state that was copied"
    assert [line["step"] for line in events(root, "step")] == [1, 2, 3, 4, 5], (
        "step 3 once: what was told first is void"
    )


def _sampler_killed(world: World, job: RlJob, number: int) -> None:
    inner, once = HubConnection.version, job.folder.root.with_suffix(".once")

    def version(self, version):
        if version == 3 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, version)

    HubConnection.version = version
    rl_sampler(world, job, number)


@pytest.mark.multiproc
def test_a_sampler_that_is_killed_is_replaced_and_costs_no_bit(place, tmp_path, monkeypatch):
    """Each of the trainer's two ranks misses it, too, which follows from its end."""
    monkeypatch.setattr(rl_ranks, "rl_sampler", _sampler_killed)
    root = tmp_path / "run"
    go(place, root, "--state.snapshot_every", "1", "--state.save_every", "100", placement="apart")
    (resumed,) = events(root, "resumed")
    assert "sampler 0, rank 0" in resumed["lost"]
    assert "SIGKILL" in resumed["lost"]


@pytest.mark.multiproc
@pytest.mark.parametrize("placement", ["shared", "apart"])
def test_a_complete_run_goes_on_to_more_steps(place, tmp_path, placement):
    """Within the lag of its last step, too, of which the versions are gone."""
    words = [
        "tune",
        "rl",
        str(place / "rl.toml"),
        "--state.dir",
        str(tmp_path / "run"),
        "--rollout.placement",
        placement,
    ]
    for steps in (1, 2, 3):
        assert main([*words, "--train.steps", str(steps)]) == 0
    assert [line["step"] for line in events(tmp_path / "run", "step")] == [1, 2, 3]
    assert not list((tmp_path / "run" / "weights").glob("*"))


@pytest.mark.multiproc
@pytest.mark.parametrize("snapshots", [(), ("--state.snapshot_every", "1")])
def test_state_that_is_corrupted_is_found_and_the_run_goes_back(place, tmp_path, monkeypatch, snapshots):
    monkeypatch.setattr(rl_ranks, "rl_rank", _flipped)
    root = tmp_path / "run"
    go(place, root, "--state.fingerprint_every", "1", "--state.save_every", "1", *snapshots)
    (back,) = events(root, "rolled_back")
    assert (back["refused"], back["step"]) == (4, 2)
    (corrupted,) = events(root, "corrupted")
    assert (corrupted["ranks"], corrupted["how"]) == ([1], "at rest")
    assert {line["step"] for line in events(root, "fingerprint")} == set(range(1, STEPS + 1))


@pytest.mark.multiproc
def test_a_gradient_that_other_ranks_do_not_compute_is_computed_again(place, tmp_path, monkeypatch):
    monkeypatch.setattr(rl_ranks, "rl_rank", _added_wrongly)
    root = tmp_path / "run"
    go(place, root, "--state.recompute_every", "2")
    (back,) = events(root, "rolled_back")
    assert (back["refused"], back["step"], back["why"]) == (
        4,
        3,
        "other ranks compute another gradient for the same rows",
    )
    assert [line["step"] for line in events(root, "step")] == [1, 2, 3, 4, 5]


@pytest.mark.multiproc
def test_a_run_writes_samples_after_its_checkpoints(place, tmp_path):
    root = tmp_path / "run"
    go(place, root, "--observe.sample", "to be")
    told = [json.loads(line) for line in (root / "samples.jsonl").read_text().splitlines()]
    assert told[-1]["step"] == STEPS
    assert "text" in told[-1], told


@pytest.mark.multiproc
@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_goes_on_from_its_store_where_the_disk_is_new(place, tmp_path, lag):
    """With a lag, answers of older weights are gone with the disk: those of the checkpoint sample the next step."""
    store = f"memory://rl-recovery-{lag}"

    def run(name: str, *flags: str) -> Path:
        root = tmp_path / name
        words = ["--state.dir", str(root), "--state.save_every", "3", "--rl.lag", str(lag), *flags]
        assert main(["tune", "rl", str(place / "rl.toml"), *words]) == 0
        return root

    shutil.rmtree(run("run", "--state.store", store, "--train.steps", "3"))
    assert CheckpointStore(store).steps() == [3]
    root = run("run", "--state.store", store)
    assert CheckpointStore(store).steps() == [3, STEPS]
    assert [line["step"] for line in events(root, "step")] == [4, 5]
    assert [line["lag"] for line in events(root, "rolled")] == [0, 0]
    if not lag:
        require_same(root, run("whole"))


SPIKES = """
from pathlib import Path

fair = grade

def grade(task, rollout):
    return fair(task, rollout) * (1.0 if len(task.prompt) > 20 else 0.001)

make = task

def task(index, seed):
    made = make(index, seed)
    return Task(prompt="to be " + "or " * 5) if index in (6, 7) else made
"""
SPIKING = ("--train.steps", "6", "--rl.estimator", "rloo", "--state.save_every", "1")
ROLLBACK = (
    "--rollback.window_steps",
    "4",
    "--rollback.skip_batches",
    "1",
    "--rollback.back_steps",
    "0",
    "--rollback.norm_sigmas",
    "1000",
    "--rollback.loss_sigmas",
    "inf",
)


@pytest.mark.multiproc
@pytest.mark.parametrize("placement", ["shared", "apart"])
def test_a_step_that_spikes_is_not_taken_and_its_prompts_are_left_out(place, tmp_path, placement):
    (place / "start" / "spikes.py").write_text(reinforced.ENVIRONMENT + SPIKES)
    words = ["tune", "rl", str(place / "rl.toml"), "--rl.environment", str(place / "start" / "spikes.py"), *SPIKING]
    words += ["--rollout.placement", placement, "--state.dir"]
    root, whole = tmp_path / "run", tmp_path / "whole"
    assert main([*words, str(root), *ROLLBACK]) == 0
    (back,) = events(root, "rolled_back")
    assert (back["refused"], back["step"], back["skip"]) == (4, 3, "3:1")
    assert "gradient norm" in back["why"] or "loss" in back["why"]
    # As the run that leaves them out from its start; and where it goes on behind them, they stay left out.
    assert main([*words, str(whole), "--train.skip", '["3:1"]']) == 0
    for step in (5, 6):
        shutil.rmtree(root / f"checkpoints/step-{step:06}")
    assert main([*words, str(root), *ROLLBACK]) == 0
    require_same(root, whole)
    steps = [
        {line["step"]: (line["loss"], line["grad_norm"]) for line in events(each, "step")} for each in (root, whole)
    ]
    assert steps[0] == steps[1]
    assert max(steps[0]) == 6
    history = read_history(root / NAME, root / "metrics.jsonl", 2)
    assert [history.tasks_of(step, 2) for step in (3, 4, 5)] == [[4, 5], [8, 9], [10, 11]]

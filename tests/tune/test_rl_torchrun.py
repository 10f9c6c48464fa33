"""A run of rewards on ranks that torchrun or srun has started: the same bits, and a refusal of what they cannot do."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

import reinforced
from join_ranks import join_ranks
from superstep.cli.arguments.tune.tune import read
from superstep.cli.main import main
from superstep.comm.codec import VERSION
from superstep.errors import ConfigError
from superstep.run.console import Silent
from superstep.run.launch_rules import Launcher
from superstep.run.rl.prepare_rl import prepare_rl_job
from superstep.run.rl.rl_job_message import RL_JOB
from superstep.tune.rl.disaggregated.hub_connection import HubConnection
from superstep.tune.rl.policy_trainer import PolicyTrainer

APART = ("--rollout.placement", "apart")
RECIPE = """
[train]
steps = 4
lr = 3e-3

[plan]
microbatch = 2

[numerics]
exact = true

[state]
save_every = 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe, and runs of it whose ranks superstep launched, with samplers among them and apart."""
    folder = tmp_path_factory.mktemp("joined")
    (folder / "start").mkdir()
    start = reinforced.start(folder / "start")
    (folder / "rl.toml").write_text(reinforced.RECIPE.format(start=start, environment="tasks.py") + RECIPE)
    command = ["tune", "rl", str(folder / "rl.toml"), "--plan.dp", "2"]
    assert main([*command, "--state.dir", str(folder / "launched")]) == 0
    assert main([*command, *APART, "--state.dir", str(folder / "apart")]) == 0
    return folder


def told(root: Path, event: str) -> list[dict]:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def require_same(root: Path, other: Path) -> None:
    losses = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in told(each, "step")] for each in (root, other)
    ]
    assert losses[0] == losses[1]
    ours, theirs = reinforced.weights(root), reinforced.weights(other)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.multiproc
def test_ranks_of_torchrun_come_to_the_bits_of_launched_ones_and_go_on_where_they_stopped(place, tmp_path):
    root = tmp_path / "run"
    command = ["tune", "rl", str(place / "rl.toml"), "--state.dir", str(root), "--state.existing", "resume"]
    assert join_ranks(tmp_path, [*command, "--train.steps", "2"])[0] == [0, 0]
    assert join_ranks(tmp_path, command) == ([0, 0], "")
    require_same(root, place / "launched")
    assert (root / "recipe.toml").is_file()


def _flip(rank: int) -> None:
    inner, taken = PolicyTrainer.step, []

    def step(self, *args, **rest):
        if rank == 1 and self.position.step == 3 and not taken:
            taken.append(True)
            piece = next(piece for piece in self.pieces(("weight",)) if piece.values.numel())
            piece.values.view(torch.int32)[1] ^= 1 << 20
        return inner(self, *args, **rest)

    PolicyTrainer.step = step


@pytest.mark.multiproc
@pytest.mark.parametrize("placement", ["shared", "apart"])
def test_they_go_back_by_themselves_where_state_is_corrupted(place, tmp_path, placement):
    root = tmp_path / "run"
    flags = ["--state.dir", str(root), "--state.fingerprint_every", "1", "--state.save_every", "1"]
    command = ["tune", "rl", str(place / "rl.toml"), "--rollout.placement", placement, *flags]
    ranks = 2 if placement == "shared" else 3
    assert join_ranks(tmp_path, command, ranks, plant=_flip) == ([0] * ranks, "")
    (back,) = told(root, "rolled_back")
    assert (back["refused"], back["step"]) == (4, 2)
    require_same(root, place / ("launched" if placement == "shared" else placement))


@pytest.mark.multiproc
def test_samplers_apart_come_to_the_bits_of_launched_ones(place, tmp_path):
    """The first two ranks train, and the third one samples."""
    root = tmp_path / "run"
    command = ["tune", "rl", str(place / "rl.toml"), *APART, "--state.dir", str(root)]
    assert join_ranks(tmp_path, command, ranks=3) == ([0, 0, 0], "")
    require_same(root, place / "apart")
    assert not list((root / "weights").iterdir())


def _kill(rank: int) -> None:
    """Once a version was sampled, and the first step with it is saved."""
    inner = HubConnection.version

    def version(self, number):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, number)

    HubConnection.version = version


@pytest.mark.multiproc
def test_a_run_whose_sampler_is_killed_ends_and_goes_on_to_the_same_bits(place, tmp_path):
    """As torchrun starts all ranks again with --max-restarts."""
    root = tmp_path / "run"
    command = ["tune", "rl", str(place / "rl.toml"), *APART, "--state.dir", str(root), "--state.existing", "resume"]
    statuses, said = join_ranks(tmp_path, [*command, "--state.save_every", "1"], ranks=3, plant=_kill)
    assert statuses[2] == -signal.SIGKILL
    assert statuses[0] == 1
    assert "sampler 0, rank 0 has gone." in said
    assert join_ranks(tmp_path, command, ranks=3) == ([0, 0, 0], "")
    require_same(root, place / "apart")


@pytest.mark.multiproc
def test_ranks_that_are_too_few_to_train_as_well_are_refused_in_one_line(place, tmp_path):
    command = ["tune", "rl", str(place / "rl.toml"), "--state.dir", str(tmp_path / "run"), *APART]
    statuses, said = join_ranks(tmp_path, [*command, "--rollout.ranks", "2"])
    assert statuses == [2, 2], said
    assert said == (
        "superstep: rollout.ranks = 2: of the 2 ranks of torchrun none is left to train; start more ranks, or set "
        "fewer.\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--state.snapshot_every", "1"), "state.snapshot_every = 1 needs ranks that superstep launches itself"),
        (("--observe.sample", "a"), "observe.sample = 'a' needs ranks that one launcher of superstep has"),
        (("--plan.dp", "3"), "3 ranks"),
    ],
)
def test_what_needs_a_launcher_of_ours_is_refused(place, flags, words):
    recipe = read(["rl", str(place / "rl.toml"), *flags])
    with (
        pytest.raises(ConfigError, match=words),
        prepare_rl_job(recipe, None, Silent(), launcher=Launcher(is_own=False), ranks=2),
    ):
        pass


def test_a_job_arrives_as_it_was_sent(place, tmp_path):
    recipe = read(["rl", str(place / "rl.toml"), "--plan.dp", "2", "--state.dir", str(tmp_path / "run")])
    with prepare_rl_job(recipe, tmp_path / "kernels", Silent()) as job:
        sent = replace(job, checkpoint=tmp_path / "checkpoint", tasks={1: 2, 2: 1})
        assert RL_JOB.decode(RL_JOB.encode(sent)) == sent
    assert RL_JOB.decode(RL_JOB.encode(None)) is None


@pytest.mark.parametrize("message", [b"", b"\x80\x04N.", bytes([VERSION]) + msgspec.msgpack.encode({"config": "x"})])
def test_other_bytes_are_no_job(message):
    with pytest.raises(msgspec.DecodeError):
        RL_JOB.decode(message)

"""A run of rewards on several hosts: the bits of one host, also where a rank or a whole host is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import reinforced
from bench import several
from superstep.cli.arguments.tune.tune import read_rewards
from superstep.cli.main import main
from superstep.errors import ConfigError
from superstep.run.console import Silent
from superstep.run.rl.prepare_rl import prepare_rl_job

WHY_NOT = several.why_not()

RECIPE = """
[train]
steps = 6
lr = 3e-3

[plan]
dp = 2
microbatch = 2

[numerics]
exact = true

[state]
save_every = 100
"""

SLOW = """
import time

quick = grade

def grade(task, rollout):
    time.sleep(0.05)
    return quick(task, rollout)
"""
APART = ["--rollout.placement", "apart", "--rollout.ranks", "2"]
HOSTS = ["--hosts", "2", "--host", "0", "--meet", "10.0.0.1:29400"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe, and runs of it on one host, with samplers among the ranks and apart."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "start").mkdir()
    start = reinforced.start(folder / "start")
    (start / "slow.py").write_text(reinforced.ENVIRONMENT + SLOW)
    (folder / "rl.toml").write_text(reinforced.RECIPE.format(start=start, environment="slow.py") + RECIPE)
    assert main(["tune", "rl", str(folder / "rl.toml"), "--state.dir", str(folder / "one")]) == 0
    assert main(["tune", "rl", str(folder / "rl.toml"), *APART, "--state.dir", str(folder / "apart")]) == 0
    return folder


@pytest.mark.multiproc
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("lost", ["a rank", "host 1"])
def test_what_is_lost_is_replaced_and_costs_no_bit(place, tmp_path, lost):
    two = tmp_path / "two"
    flags = ["--state.dir", str(two), "--state.existing", "resume", "--state.snapshot-every", "1"]
    with several.Several(place, flags, verb=("tune", "rl", "rl.toml")) as hosts:
        hosts.start(1)
        hosts.start(0)
        hosts.until(lambda: len(several.told(two, "step")) >= 3)
        if lost == "a rank":
            os.kill(hosts.ranks(1)[0], signal.SIGKILL)
        else:
            hosts.kill(1)
            hosts.start(1)
        assert hosts.wait() == [0, 0], hosts.output()
    (resumed,) = several.told(two, "resumed")
    assert ("SIGKILL" if lost == "a rank" else "host 1") in resumed["lost"], resumed
    if lost == "a rank":  # a neighbour's copies, by which a host is replaced, come later
        assert resumed["step"] >= 2, "each step's state is in memory"
    require_same(two, place / "one")


def require_same(root: Path, other: Path) -> None:
    assert several.losses(root) == several.losses(other)
    ours, theirs = reinforced.weights(root), reinforced.weights(other)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.multiproc
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_samplers_apart_on_each_host_have_the_bits_of_one_host_and_are_replaced(place, tmp_path):
    """Each host trains with one rank and samples with another; the one that samples on host 1 is killed."""
    two = tmp_path / "two"
    flags = ["--state.dir", str(two), "--state.existing", "resume", "--state.snapshot-every", "1", *APART]
    with several.Several(place, flags, verb=("tune", "rl", "rl.toml")) as hosts:
        hosts.start(1)
        hosts.start(0)
        hosts.until(lambda: len(several.told(two, "step")) >= 3)
        trainer, sampler = hosts.ranks(1)
        os.kill(sampler, signal.SIGKILL)
        assert hosts.wait() == [0, 0], hosts.output()
        assert trainer not in hosts.ranks(1)
    (resumed,) = several.told(two, "resumed")
    assert "sampler 1, rank 0" in resumed["lost"]
    assert "SIGKILL" in resumed["lost"]
    assert resumed["step"] >= 2
    require_same(two, place / "apart")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rollout.placement", "apart"], "rollout.ranks = 1: --hosts = 2 share the samplers evenly"),
        (["--observe.sample", "a"], "observe.sample = 'a' needs ranks that one launcher of superstep has"),
        (["--plan.dp", "1"], "--hosts = 2 does not divide the plan's 1 ranks"),
        (["--state.peers", "1"], "state.peers = 1"),
    ],
)
def test_what_several_hosts_cannot_do_is_refused(place, monkeypatch, flags, words):
    monkeypatch.setenv("SUPERSTEP_SECRET", several.SECRET)
    asked = read_rewards([str(place / "rl.toml"), *HOSTS, *flags])
    assert asked.hosts is not None
    with (
        pytest.raises(ConfigError, match=words),
        prepare_rl_job(asked.recipe, None, Silent(), hosts=asked.hosts.count),
    ):
        pass

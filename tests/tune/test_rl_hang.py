"""Reinforcement learning is watched as training is: a rank that hangs is named, and nobody waits for it."""

from __future__ import annotations

import ctypes
import time

import pytest

import reinforced
from superstep.errors import RankLost
from superstep.launch.ranks import World, launch_on
from superstep.state.checkpoint_dirs import checkpoints
from superstep.tune.rl.colocated import reinforce
from superstep.tune.rl.job import RlJob
from superstep.tune.rl.policy_trainer import PolicyTrainer

HANGS_S = 1_000


def _hanging(world: World, job: RlJob) -> bool:
    """Rank 1 holds the GIL in C for good when it should train for the second time."""
    if world.rank == 1:
        step = PolicyTrainer.step

        def hang(self: PolicyTrainer, *args: object, **kwargs: object) -> object:
            if self.position.step == 1:
                ctypes.PyDLL(None).sleep(HANGS_S)
            return step(self, *args, **kwargs)  # type: ignore[arg-type]

        PolicyTrainer.step = hang  # type: ignore[method-assign, assignment]
    return reinforce(world, job)


@pytest.mark.multiproc
def test_a_rank_that_hangs_is_named(tmp_path):
    start = tmp_path / "start"
    start.mkdir()
    job = reinforced.job(tmp_path / "run", reinforced.start(start), dp=2)
    job.folder.root.mkdir(exist_ok=True)
    began_s = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1, host \S+, step 1.*its process \d+ hangs: it has held the GIL") as lost:
        launch_on("cpu", 2, _hanging, job)
    assert lost.value.rank == 1
    assert time.monotonic() - began_s < 60, "not at the timeout of a collective"
    assert [place.name for place in checkpoints(job.folder.checkpoints)] == ["step-000001"]

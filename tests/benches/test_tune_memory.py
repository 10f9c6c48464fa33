"""Bytes of a run of reinforcement learning are those that its program says: what torch's allocator hands out."""

from __future__ import annotations

import pytest

from bench import tune_memory
from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.config import ModelConfig

pytestmark = pytest.mark.multiproc


def taken(rank, size, jobs):
    """The peak of each."""
    return [tune_memory.taken(World(rank, size, Device("cpu")), job) for job in jobs]


@pytest.mark.long
def test_the_peak_of_a_run_is_predicted(pool, tmp_path):
    small = ModelConfig(name="tiny", layers=2, width=192, heads=4, kv_heads=4, ffn=512)
    begin = tune_memory.start(tmp_path / "start", small)
    jobs = [
        tune_memory.job_for(tmp_path / name, begin, groups=1, **settings)
        for name, settings in {"fast": {"exact": False}, "exact": {"exact": True, "kl_coef": 0.1}}.items()
    ]
    foretold = [tune_memory.predicted(job)[0] for job in jobs]
    assert pool.run(1, taken, jobs)[0] == pytest.approx(foretold, rel=tune_memory.ALLOWED)

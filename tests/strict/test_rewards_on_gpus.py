"""Learning from rewards on emulated GPUs: shared by who trains and who samples, and apart."""

from dataclasses import replace

import pytest

import reinforced
from strict_ranks import SETTINGS, gpu_of
from superstep.plan.config import LoraConfig

pytestmark = pytest.mark.strict

ROOM = replace(SETTINGS, device_bytes=16 << 30)
"""What NCCL's communicators take is counted, and no memory until it is used."""


def run_on_gpus(rank, world, job, folder=None):
    """What is told of each step, and what the device saw."""
    with gpu_of(rank, world, ROOM) as (gpu, report):
        if folder is None:
            return reinforced.run(rank, world, job, device=gpu), report()
        return reinforced.run_apart(rank, world, job, folder, device=gpu), report()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return reinforced.start(tmp_path_factory.mktemp("start"))


def assert_learns_the_same(found, wanted):
    """Steps, rewards and drawn tokens are equal; what is summed in other orders is near."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        measures, others = one.pop("measures"), other.pop("measures")
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)
        assert measures == pytest.approx(others, rel=1e-3, abs=1e-6)


CASES = {
    "shared tp": (2, {"dp": 2, "rollout": {"tp": 2}}),
    "shared fast": (1, {"exact": False, "rl": {"kl_coef": 0.1}}),
    "apart": (2, {"rollout": {"placement": "apart"}}),
    "apart tp": (3, {"rollout": {"placement": "apart", "tp": 2}, "lora": LoraConfig(rank=4, alpha=8.0)}),
}


@pytest.mark.parametrize("name", CASES)
def test_gpus_learn_what_a_cpu_learns(pool, start, tmp_path, name):
    ranks, how = CASES[name]
    is_apart = name.startswith("apart")
    alone = {key: value for key, value in how.items() if key not in {"dp", "rollout"}}
    wanted = pool.run(1, reinforced.run, reinforced.job(tmp_path / "cpu", start, steps=2, **alone), timeout_s=60)[0]
    folder = str(tmp_path) if is_apart else None
    found = pool.run(
        ranks, run_on_gpus, reinforced.job(tmp_path / "gpus", start, steps=2, **how), folder, timeout_s=120
    )
    assert_learns_the_same(found[0][0], wanted)
    for rank, (_, observed) in enumerate(found):
        assert observed.races == {}
        assert observed.contexts == {rank}

"""Tables with sparse gradients on emulated GPUs: the CPU's numbers, and no race."""

import pytest

from sparse_tables import batches, recommender, run_of
from strict_ranks import prove_on_gpus
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = pytest.mark.strict

LAYOUTS = {
    "one": {},
    "dp": {"dp": 2, "microbatch": 2},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 3": {"dp": 2, "zero": 3, "microbatch": 2, "recompute": "full"},
    "pp": {"pp": 2, "microbatch": 2, "schedule": "zb-h1"},
}


def prove_here(rank, world, run, folder):
    return prove_on_gpus(rank, world, run, batches(), folder, recommender())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_cpus_losses(pool, tmp_path, name):
    run = run_of(**LAYOUTS[name])
    write_reference(recommender(), run.config.train, batches(), tmp_path)
    for rank, (first, observed) in enumerate(pool.run(run.plan.mesh.world, prove_here, run, tmp_path, timeout_s=60)):
        assert not first
        assert observed.races == {}
        assert observed.contexts == {rank}

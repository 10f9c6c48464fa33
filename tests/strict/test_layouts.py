"""Every layout on emulated GPUs: the CPU's losses, and no two uses of memory that nothing orders."""

import pytest

import small
from strict_ranks import prove_on_gpus
from superstep.plan.resolve import resolve
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = pytest.mark.strict

LAYOUTS = {
    "one": {},
    "bf16": {"compute": "bf16"},
    "selective": {"compute": "bf16", "recompute": "selective"},
    "full": {"recompute": "full"},
    "masked": {"masked": True},
    "exact": {"exact": True},
    "dp": {"dp": 2, "zero": 0},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 2 bf16": {"dp": 2, "zero": 2, "compute": "bf16"},
    "zero 3": {"dp": 2, "zero": 3},
    "zero 3 full": {"dp": 2, "zero": 3, "recompute": "full", "layers": 4},
    "hsdp": {"dp": 4, "zero": 3, "replicas": 2},
    "tp": {"tp": 2},
    "tp exact": {"tp": 2, "exact": True},
    "sp": {"tp": 2, "sequence_parallel": True},
    "sp bf16": {"tp": 2, "sequence_parallel": True, "compute": "bf16"},
    "ring": {"cp": 2, "context": "ring"},
    "ring masked": {"cp": 2, "context": "ring", "masked": True},
    "ulysses": {"cp": 2, "context": "ulysses"},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "1f1b exact": {"pp": 2, "schedule": "1f1b", "exact": True},
    "interleaved": {"pp": 2, "chunks": 2, "schedule": "interleaved"},
    "breadth-first": {"pp": 2, "chunks": 2, "schedule": "breadth-first"},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zb-v": {"pp": 2, "chunks": 2, "schedule": "zb-v"},
    "pp 4": {"pp": 4, "schedule": "1f1b", "microbatch": 1},
    "pp dp zero 3": {"pp": 2, "dp": 2, "zero": 3},
    "pp tp": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "dp tp": {"dp": 2, "tp": 2, "zero": 2},
    "dp cp": {"dp": 2, "cp": 2, "zero": 3},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_cpus_losses(pool, tmp_path, name):
    layout = LAYOUTS[name]
    config = small.config(packed=False, **{"microbatch": 2, "layers": small.layers_for(layout), **layout})
    run = resolve(config)
    batches = small.batches(packed=False)
    write_reference(run.shape, run.config.train, batches, tmp_path)
    found = pool.run(run.plan.mesh.world, prove_on_gpus, run, batches, tmp_path, timeout_s=60)
    for rank, (first, observed) in enumerate(found):
        assert first is None
        assert observed.races == {}
        assert observed.contexts == {rank}

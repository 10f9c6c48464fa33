"""Every layout on emulated GPUs: the CPU's losses, and no two uses of memory that nothing orders."""

from dataclasses import replace
from functools import partial

import pytest

import small
from strict_ranks import prove_on_gpus
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.all_layouts import layouts
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = pytest.mark.strict

LAYOUTS = {
    "one": {},
    "bf16": {"compute": "bf16"},
    "fp16": {"compute": "fp16"},
    "selective": {"compute": "bf16", "recompute": "selective"},
    "full": {"recompute": "full"},
    "masked": {"masked": True},
    "exact": {"exact": True},
    "dp": {"dp": 2, "zero": 0},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 2 bf16": {"dp": 2, "zero": 2, "compute": "bf16"},
    "zero 2 fp16": {"dp": 2, "zero": 2, "compute": "fp16"},
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
    "breadth-first": {"pp": 2, "chunks": 2, "schedule": "breadth-first", "recompute": "full"},
    "zb-h1": {"pp": 4, "schedule": "zb-h1"},
    "zb-v": {"pp": 2, "chunks": 2, "schedule": "zb-v"},
    "pp 4": {"pp": 4, "schedule": "1f1b", "microbatch": 1},
    "pp dp zero 3": {"pp": 2, "dp": 2, "zero": 3},
    "pp tp": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "dp tp": {"dp": 2, "tp": 2, "zero": 2},
    "dp cp": {"dp": 2, "cp": 2, "zero": 3},
    "gpipe dp": {"pp": 2, "dp": 2, "zero": 2, "microbatch": 1, "schedule": "gpipe"},
    "zb-v tp": {"pp": 2, "tp": 2, "microbatch": 1, "schedule": "zb-v", "chunks": 2},
    "hsdp zero 1": {"dp": 4, "zero": 1, "replicas": 2},
}

RUN_TWICE = ("zero 3", "1f1b")
"""Whose bits have to be the same again."""


def run_of(**layout):
    return resolve(small.config(packed=False, **{"microbatch": 2, "layers": small.layers_for(layout), **layout}))


def batches_of(run):
    data = run.config.data
    return small.batches(packed=data.packed, sequences=run.config.train.batch_sequences, tokens=data.sequence_tokens)


def assert_sound(pool, run, folder, *, reruns, timeout_s=60):
    batches = batches_of(run)
    write_reference(run.shape, run.config.train, batches, folder)
    job = partial(prove_on_gpus, reruns=reruns)
    ranks = pool.run(run.plan.mesh.world, job, run, batches, folder, timeout_s=timeout_s)
    for rank, (first, observed) in enumerate(ranks):
        assert first is None, run.config.plan
        assert observed.races == {}, run.config.plan
        assert observed.contexts == {rank}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_cpus_losses(pool, tmp_path, name):
    assert_sound(pool, run_of(**LAYOUTS[name]), tmp_path, reruns=name in RUN_TWICE)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_every_layout_gives_the_cpus_losses(pool, tmp_path, world):
    layers, sequences = {2: (5, 8), 3: (7, 12), 4: (9, 8), 6: (13, 24)}[world]
    config = small.config(layers=layers, sequences=sequences)
    if world % 3 == 0:  # what three tp and three cp ranks can share
        model = replace(config.model, width=24, heads=6, kv_heads=6, ffn=48, vocab=66)
        config = replace(config, model=model, data=replace(config.data, sequence_tokens=24))
    for number, run in enumerate(layouts(config, world)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_sound(pool, run, folder, reruns=number % 5 == 0, timeout_s=300)

"""A frozen base in blocks of few bits: every layout computes what one device computes, and exact mode the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import small
from adapters import both_at_work
from exact_bits import prove_run_bits, write_run_bits
from superstep.comm.device import Device
from superstep.cost.program.flops import rank_parameters
from superstep.engine.flat.buffers import UnitBuffers
from superstep.launch.ranks import World
from superstep.plan.config import LoraConfig
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import prove, write_reference
from superstep.train.weights.model import units_of

pytestmark = pytest.mark.multiproc

LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "o_proj", "down_proj"), base="nf4")
TOKENS = 16


def config(*, lora=LORA, exact=False, **found):
    """A run with blocks that tp = 4 cuts, and more blocks than one group has."""
    compute = found.pop("compute", "fp32")
    made = small.config(layers=2, packed=False, microbatch=2, compute=compute, **found)
    shape = replace(made.model, width=256, heads=8, kv_heads=8, head_dim=32, ffn=256)
    numerics = replace(made.numerics, exact=exact, exact_chunks=4 if exact else None)
    return replace(made, lora=lora, model=shape, numerics=numerics)


def _write(rank, world, run, folder):
    torch.set_num_threads(1)
    write_reference(both_at_work(run), run.config.train, small.batches(packed=False), Path(folder))


def _prove(rank, world, cases):
    torch.set_num_threads(1)
    batches = small.batches(packed=False)
    return [
        prove(World(rank, world, Device("cpu")), run, batches, Path(folder), reruns=False, specs=both_at_work(run))
        for run, folder in cases
    ]


LAYOUTS = {
    1: [{"recompute": "selective"}],
    2: [{"tp": 2}, {"dp": 2, "zero": 3, "recompute": "full"}, {"pp": 2, "schedule": "zb-h1"}, {"tp": 2, "tied": False}],
}


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory):
    """The folder of one process's steps, of each base."""
    folders = {}

    def folder(run):
        key = (run.config.lora, run.shape.tied)
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp("reference"))
            pool.run(1, _write, run, folders[key])
        return folders[key]

    return folder


@pytest.mark.parametrize("base", ["nf4", "int8"])
@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts_train_what_one_process_trains(pool, reference, world, base):
    runs = [resolve(config(lora=replace(LORA, base=base), **plan)) for plan in LAYOUTS[world]]
    verdicts = pool.run(world, _prove, [(run, reference(run)) for run in runs], timeout_s=300)[0]
    for plan, verdict in zip(LAYOUTS[world], verdicts, strict=True):
        assert verdict.is_proven, (plan, verdict.first and verdict.first.describe())


EXACT = {
    2: [("fp32", {"tp": 2}), ("bf16", {"tp": 2, "sequence_parallel": False}), ("bf16", {"dp": 2, "zero": 3})],
    4: [("bf16", {"tp": 4}), ("bf16", {"pp": 2, "tp": 2})],
}


@pytest.fixture(scope="module")
def bits(pool, tmp_path_factory):
    """The folder of one rank's bits, of each dtype."""
    folders = {}

    def folder(compute, run):
        if compute not in folders:
            folders[compute] = str(tmp_path_factory.mktemp("bits"))
            alone = replace(run.config, plan=replace(config().plan, microbatch=run.plan.microbatch))
            pool.run(1, write_run_bits, resolve(alone), folders[compute])
        return folders[compute]

    return folder


@pytest.mark.parametrize("world", EXACT)
def test_exact_mode_has_the_same_bits_on_every_layout(pool, bits, tmp_path, world):
    runs = [(compute, resolve(config(compute=compute, exact=True, **plan))) for compute, plan in EXACT[world]]
    cases = [(run, bits(compute, run)) for compute, run in runs]
    verdicts = pool.run(world, prove_run_bits, cases, str(tmp_path), timeout_s=400)[0]
    for (compute, plan), verdict in zip(EXACT[world], verdicts, strict=True):
        told = [d.describe() for d in (verdict.first, verdict.first_resumed) if d]
        assert verdict.is_proven, (compute, plan, told)
        assert verdict.compared > 5_000


def test_blocks_that_are_counted_from_the_shard_are_seen(pool, bits, tmp_path):
    """A planted fault: a rank unpacks its part as if it were the whole."""
    run = resolve(config(compute="bf16", exact=True, tp=2))
    (verdict,) = pool.run(2, _prove_shards, run, bits("bf16", run), str(tmp_path))[0]
    assert not verdict.is_proven


def _prove_shards(rank, world, run, folder, to):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitBuffers, "place_blocks", lambda buffers, module: None)
        return prove_run_bits(rank, world, [(run, folder)], to)


def test_a_base_in_blocks_has_few_bytes():
    run = resolve(config())
    packed = [p for unit in units_of(run) for p in unit.params.values() if p.packed]
    each = [unit for unit in rank_parameters(run) if unit.whole_packed]
    weights = sum(p.packed.shape[0] * p.packed.shape[1] for p in packed if not p.packed.is_scales)
    assert sum(unit.count_packed_on_rank(1) for unit in each) <= 0.53 * weights

"""Mixtures of experts, adapters and documents on emulated GPUs: the CPU's numbers, and its digits in exact mode."""

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest

import small
from pool import RankError
from strict_ranks import prove_bits_on_gpus, prove_on_gpus
from superstep.comm.backend import Transport
from superstep.comm.device import Device
from superstep.kernels import attention, cpu_library
from superstep.kernels.compile_cpp import BuildResult
from superstep.launch.ranks import World
from superstep.model.unit import initial
from superstep.plan.config import LoraConfig
from superstep.plan.resolution.resolve import resolve
from superstep.plan.trained_parts import FreezeConfig
from superstep.train.proof import prove_tolerance
from superstep.train.proof.prove_exact import Relay, write_bits
from superstep.train.proof.prove_tolerance import write_reference
from superstep.train.weights.model import units_of

pytestmark = pytest.mark.strict

TOKENS = 32
FRONT = ("model.embed*", "model.layers.0.*")
LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))


def config(
    *, router=None, lora=False, documents=False, head_dim=8, exact=False, compute="fp32", dropout=0.0, freeze=(), **plan
):
    """A run with heads and experts of widths that kernels for GPUs take."""
    plan = {"layers": small.layers_for(plan), "microbatch": small.microbatch_for(plan)} | plan
    found = small.config(packed=documents, masked=documents, compute=compute, **plan)
    model = replace(found.model, heads=4, kv_heads=2, head_dim=head_dim, dropout=dropout)
    if router is not None:
        model = replace(model, experts=4, router=router, ffn=24, shared_experts=1, balance_weight=0.2, z_weight=0.05)
    return replace(
        found,
        model=model,
        data=replace(found.data, sequence_tokens=TOKENS),
        numerics=replace(found.numerics, exact=exact, exact_chunks=4 if exact else None),
        lora=LORA if lora else None,
        freeze=FreezeConfig(params=freeze) if freeze else None,
    )


def batches(run):
    documents = run.config.data.document_mask
    return small.batches(packed=documents, masked=documents, tokens=TOKENS)


def both_factors_at_work(run):
    """The run's units, whose B starts with other values than zeros: else A has no gradient."""
    found = []
    for unit in units_of(run):
        params = dict(unit.params)
        for local, param in params.items():
            if param.factor == "b":
                shape = next(p.dims for u in run.outline.units for p in u.parameters if p.name == param.name)
                params[local] = replace(param, values=initial(replace(param, std=0.3), shape, 1))
        found.append(replace(unit, params=params))
    return found


def assert_sound(found):
    for rank, (first, observed) in enumerate(found):
        assert not first
        assert observed.races == {}
        assert observed.contexts == {rank}


LAYOUTS = {
    "experts": {"router": "dropless"},
    "experts selective": {"router": "switch", "compute": "bf16", "recompute": "selective"},
    "experts dp": {"router": "top2", "dp": 2, "zero": 2, "compute": "bf16"},
    "ep dp": {"router": "dropless", "dp": 2, "ep": 2, "zero": 1, "recompute": "full"},
    "ep dp bf16": {"router": "dropless", "dp": 2, "ep": 2, "zero": 3, "compute": "bf16"},
    "ep tp": {"router": "switch", "tp": 2, "ep": 2, "sequence_parallel": True},
    "ep tp bf16": {"router": "dropless", "tp": 2, "ep": 2, "compute": "bf16", "recompute": "selective"},
    "ep cp": {"router": "top2", "cp": 2, "ep": 2, "zero": 2},
    "ep cp bf16": {"router": "noisy-topk", "cp": 2, "ep": 2, "context": "ulysses", "compute": "bf16"},
    "experts tp": {"router": "dropless", "tp": 2, "zero": 3},
    "experts pp": {"router": "noisy-topk", "pp": 2, "schedule": "zb-h1", "recompute": "selective"},
    "ep pp dp": {"router": "dropless", "pp": 2, "dp": 2, "ep": 2, "zero": 2, "schedule": "zb-v", "chunks": 2},
    "lora": {"lora": True, "recompute": "selective"},
    "lora dp": {"lora": True, "dp": 2, "zero": 3},
    "lora tp": {"lora": True, "tp": 2, "sequence_parallel": True, "zero": 1},
    "lora pp": {"lora": True, "pp": 2, "schedule": "zb-h1"},
    "frozen pp": {"freeze": FRONT, "pp": 2, "tied": False},
    "frozen dp bf16": {
        "freeze": (*FRONT, "*norm.weight", "*.q_proj.*", "*.up_proj.*"),
        "dp": 2,
        "zero": 2,
        "compute": "bf16",
    },
    "frozen tp": {"freeze": ("model.embed*", "*.self_attn.*"), "tp": 2, "sequence_parallel": True, "zero": 1},
    "frozen zero 3": {"freeze": ("model.layers.1.*",), "dp": 2, "zero": 3, "recompute": "full"},
    "documents": {"documents": True, "recompute": "selective"},
    "documents bf16": {"documents": True, "compute": "bf16"},
    "documents ring": {"documents": True, "cp": 2, "context": "ring"},
    "documents ring bf16": {"documents": True, "cp": 2, "context": "ring", "compute": "bf16"},
    "documents ulysses": {"documents": True, "cp": 2, "context": "ulysses", "compute": "bf16"},
    "documents experts": {"documents": True, "router": "dropless", "cp": 2, "ep": 2},
    "untied pp": {"tied": False, "pp": 2},
    "tied pp bf16": {"tied": True, "pp": 2, "compute": "bf16"},
    "dropout dp bf16": {"dropout": 0.2, "dp": 2, "zero": 2, "compute": "bf16", "recompute": "selective"},
    "uneven stages": {"pp": 2, "stages": (1, 5)},
    "uneven stages untied": {"pp": 2, "stages": (4, 2), "tied": False, "schedule": "zb-h1"},
}


def prove_here(rank, world, run, folder):
    specs = both_factors_at_work(run) if run.config.lora else None
    return prove_on_gpus(rank, world, run, batches(run), folder, specs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_cpus_losses(pool, tmp_path, name):
    run = resolve(config(**LAYOUTS[name]))
    model = both_factors_at_work(run) if run.config.lora else units_of(run) if run.config.freeze else run.shape
    write_reference(model, run.config.train, batches(run), tmp_path)
    found = pool.run(run.plan.mesh.world, prove_here, run, tmp_path, timeout_s=60)
    assert_sound(found)


def prove_unconnected(rank, world, run, folder):
    """Channels of the pipeline are connected by what a step sends first."""
    no_channel = mock.patch.object(Transport, "connect_channel", return_value=None)
    with no_channel, mock.patch.object(prove_tolerance, "TIMEOUT", timedelta(seconds=3)):
        return prove_here(rank, world, run, folder)


def test_first_uses_of_channels_within_a_step_cross_where_hosts_wait_for_experts(pool, tmp_path):
    run = resolve(config(router="dropless", pp=2, schedule="gpipe"))
    write_reference(run.shape, run.config.train, batches(run), tmp_path)
    first = r"ranks \[\d\] of it have not come to 'use 0, the first transfer from \d to \d'"
    with pytest.raises(RankError, match=first):
        pool.run(2, prove_unconnected, run, tmp_path, timeout_s=60)


EXACT = {
    "one": {},
    "dp": {"dp": 2, "zero": 3, "recompute": "full"},
    "tp": {"tp": 2, "sequence_parallel": False},
    "sp bf16": {"tp": 2, "sequence_parallel": True, "compute": "bf16"},
    "ring": {"cp": 2},
    "ulysses bf16": {"cp": 2, "context": "ulysses", "compute": "bf16"},
    "pp": {"pp": 2, "schedule": "zb-h1"},
    "ep": {"router": "dropless", "dp": 2, "ep": 2, "zero": 2},
    "experts bf16": {"router": "switch", "tp": 2, "ep": 2, "compute": "bf16"},
    "lora": {"lora": True, "tp": 2},
    "documents": {"documents": True, "cp": 2},
    "pp dp bf16": {"pp": 2, "dp": 2, "zero": 2, "schedule": "1f1b", "compute": "bf16"},
    "dropout": {"dropout": 0.2, "tp": 2, "sequence_parallel": True, "recompute": "full"},
}


def write_bits_on_cpu(rank, world, run, folder):
    """By torch alone, as a GPU has none of the kernels of ``superstep.kernels`` for exact mode on CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cpu_library, attention):
            patch.setattr(module, "compile_library", lambda: BuildResult(None, "a GPU has none"))
        return write_bits(World(rank, world, Device("cpu")), run, batches(run), folder, stop=1)


def run_exactly(pool, folder, name):
    """The run of a layout and its batches; the CPU's digits are in the folder, of one rank from its start."""
    layout = {"microbatch": 2, "head_dim": 16} | EXACT[name]
    run = resolve(config(exact=True, **layout))
    alone = {
        key: layout[key]
        for key in ("router", "lora", "documents", "compute", "dropout", "microbatch", "head_dim", "tied")
        if key in layout
    }
    one = resolve(config(exact=True, layers=run.shape.layers, **alone))
    pool.run(1, write_bits_on_cpu, one, folder, timeout_s=60)
    return run, batches(run)


def relay_of(folder):
    """From the checkpoint of that rank."""
    return Relay(take=folder / "checkpoint", leave=None, step=1)


@pytest.mark.parametrize("name", EXACT)
def test_exact_mode_gives_the_cpus_digits(pool, tmp_path, name):
    run, batches = run_exactly(pool, tmp_path, name)
    relay, world = relay_of(tmp_path), run.plan.mesh.world
    assert_sound(pool.run(world, prove_bits_on_gpus, run, batches, tmp_path, relay, timeout_s=60))

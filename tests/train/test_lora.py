"""Adapters in the trainer: every layout computes what one device computes, and exact mode the same bits on all."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import small
from adapters import both_at_work
from exact_bits import prove_run_bits, write_run_bits
from longer import first_few, many_ranks
from superstep.comm.device import Device
from superstep.comm.objects import gather
from superstep.launch.ranks import World
from superstep.model.custom.inspect import outline_of
from superstep.model.custom.units_from_modules import as_units
from superstep.model.lora import adapt
from superstep.plan.config import LoraConfig
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import prove, write_reference

pytestmark = pytest.mark.multiproc

LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
TOKENS = 32


def config(*, lora=LORA, bias=False, **found):
    """A run of few layers; ``bias`` makes it a Qwen2, with biases on queries, keys and values."""
    made = small.config(
        layers=small.layers_for(found), packed=False, microbatch=small.microbatch_for(found), qk_norm=not bias, **found
    )
    return replace(made, lora=lora)


def _write(rank, world, run, folder):
    torch.set_num_threads(1)
    write_reference(both_at_work(run), run.config.train, small.batches(packed=False), Path(folder))


def _prove(rank, world, cases):
    found = []
    for run, folder in cases:
        specs, batches = both_at_work(run), small.batches(packed=False)
        found.append(prove(World(rank, world, Device("cpu")), run, batches, Path(folder), reruns=False, specs=specs))
    return found


LAYOUTS = {
    1: [{"recompute": "full"}, {"recompute": "selective"}, {"chunks": 2, "schedule": "interleaved"}, {"tied": False}],
    2: [
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"tp": 2, "sequence_parallel": False, "recompute": "selective"},
        {"tp": 2, "tied": False, "rules": (("ffn", "none"),)},
        {"cp": 2, "zero": 3},
        {"pp": 2, "stages": (1, 5)},
        {"pp": 2, "schedule": "zb-h1"},
        {"dp": 2},
        {"dp": 2, "zero": 2},
        {"tp": 2},
        {"cp": 2, "context": "ulysses"},
        {"pp": 2},
        {"pp": 2, "chunks": 2, "schedule": "zb-v"},
    ],
    4: [
        {"dp": 2, "tp": 2, "zero": 3},
        {"dp": 2, "tp": 2, "zero": 2, "sequence_parallel": False},
        {"pp": 2, "tp": 2, "schedule": "zb-h1"},
        {"dp": 4, "zero": 3, "replicas": 2},
        {"pp": 2, "dp": 2, "zero": 2, "chunks": 2, "schedule": "breadth-first"},
        {"cp": 2, "tp": 2, "zero": 1},
    ],
}


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory):
    """The folder of one process's steps, of each number of layers, tied or not."""
    folders = {}

    def folder(run):
        key = (run.shape.layers, run.shape.tied, run.config.lora)
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp("reference"))
            pool.run(1, _write, run, folders[key])
        return folders[key]

    return folder


@pytest.mark.parametrize(("world", "part"), first_few(LAYOUTS, {1: 4, 2: 7}))
def test_layouts_train_what_one_process_trains(pool, reference, world, part):
    plans = LAYOUTS[world][part]
    runs = [resolve(config(**plan)) for plan in plans]
    verdicts = pool.run(world, _prove, [(run, reference(run)) for run in runs], timeout_s=300)[0]
    for plan, run, verdict in zip(plans, runs, verdicts, strict=True):
        assert verdict.is_proven, (plan, verdict.first and verdict.first.describe())
        # Of every factor gradients, moments and updates; of nothing else.
        assert verdict.compared >= 2 * 5 * run.shape.layers * 4


DROPPED = replace(LORA, dropout=0.3)
DROPPING = [
    {"tp": 2, "recompute": "selective"},
    {"tp": 2, "sequence_parallel": False, "zero": 1},
    {"cp": 2, "recompute": "full"},
    {"dp": 2, "zero": 3},
    {"pp": 2, "schedule": "zb-h1"},
]


def test_layouts_drop_the_same_inputs_of_adapters(pool, reference):
    runs = [resolve(config(lora=DROPPED, dropout=0.1, **plan)) for plan in DROPPING]
    verdicts = pool.run(2, _prove, [(run, reference(run)) for run in runs], timeout_s=300)[0]
    for plan, verdict in zip(DROPPING, verdicts, strict=True):
        assert verdict.is_proven, (plan, verdict.first and verdict.first.describe())


class Mixer(torch.nn.Module):
    """A module of nobody's."""

    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


def _own(**plan):
    """A run of units of nobody's, and these with adapters."""
    torch.manual_seed(0)
    modules = [torch.nn.Embedding(small.VOCAB, 24), Mixer(24), Mixer(24), torch.nn.Linear(24, small.VOCAB)]
    specs = as_units(modules)
    run = resolve(
        replace(config(**plan), lora=LoraConfig(rank=2, targets=("wide", "narrow"))), outline=outline_of(specs, "own")
    )
    return run, adapt(specs, run.outline, run.config.lora)


def _prove_own(rank, world, plans, folder):
    found = []
    for plan in plans:
        run, specs = _own(**plan)
        batches = small.batches(packed=False)
        if rank == 0 and not Path(folder).exists():
            Path(folder).mkdir()
            write_reference(both_at_work(run, specs), run.config.train, batches, Path(folder))
        gather(None, None)
        specs = both_at_work(run, specs)
        found.append(prove(World(rank, world, Device("cpu")), run, batches, Path(folder), reruns=False, specs=specs))
    return found


def test_units_of_nobodys_take_adapters_too(pool, tmp_path):
    plans = [{"dp": 2, "zero": 3}, {"dp": 2, "zero": 1, "recompute": "selective"}, {"pp": 2, "schedule": "1f1b"}]
    verdicts = pool.run(2, _prove_own, plans, str(tmp_path / "reference"))[0]
    for plan, verdict in zip(plans, verdicts, strict=True):
        assert verdict.is_proven, (plan, verdict.first and verdict.first.describe())
        assert {d.name.rpartition(".lora_")[0].rpartition(".")[2] for d in verdict.worst if d.name} <= {
            "wide",
            "narrow",
        }


EXACT = {
    1: [("fp32", {"recompute": "selective"}), ("fp32", {"recompute": "full", "lora": DROPPED})],
    2: [
        ("fp32", {"tp": 2}),
        ("fp32", {"tp": 2, "sequence_parallel": False}),
        ("fp32", {"dp": 2, "zero": 3}),
        ("fp32", {"cp": 2}),
        ("fp32", {"pp": 2, "schedule": "zb-h1"}),
        ("bf16", {"tp": 2}),
        ("fp32", {"tp": 2, "lora": DROPPED}),
        ("bf16", {"cp": 2, "lora": DROPPED}),
    ],
    4: [("fp32", {"tp": 4}), ("bf16", {"dp": 2, "tp": 2, "zero": 2}), ("bf16", {"pp": 2, "cp": 2})],
}


def exact(compute, **plan):
    found = config(compute=compute, **plan)
    return resolve(
        replace(
            found,
            data=replace(found.data, sequence_tokens=TOKENS),
            numerics=replace(found.numerics, exact=True, exact_chunks=4),
        )
    )


@pytest.fixture(scope="module")
def bits(pool, tmp_path_factory):
    """The folder of one rank's bits, of each dtype, number of layers and microbatch."""
    folders = {}

    def folder(compute, run):
        key = (compute, run.shape.layers, run.plan.microbatch, run.config.lora)
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp("bits"))
            found = run.config
            alone = replace(found, plan=replace(config().plan, microbatch=run.plan.microbatch))
            pool.run(1, write_run_bits, resolve(alone), folders[key])
        return folders[key]

    return folder


@pytest.mark.parametrize("world", many_ranks(EXACT, most=1))
def test_exact_mode_has_the_same_bits_on_every_layout(pool, bits, tmp_path, world):
    runs = [(compute, exact(compute, **plan)) for compute, plan in EXACT[world]]
    cases = [(run, bits(compute, run)) for compute, run in runs]
    verdicts = pool.run(world, prove_run_bits, cases, str(tmp_path), timeout_s=400)[0]
    for (compute, plan), verdict in zip(EXACT[world], verdicts, strict=True):
        told = [d.describe() for d in (verdict.first, verdict.first_resumed) if d]
        assert verdict.is_proven, (compute, plan, told)
        assert verdict.compared > 5_000

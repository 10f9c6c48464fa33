"""Frozen parameters by name: every layout computes what one process computes, and exact mode the same bits on all."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import small
from exact_bits import prove_run_bits, write_run_bits
from longer import first_few, many_ranks
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers
from superstep.engine.engine import Engine
from superstep.launch.ranks import World
from superstep.model.by_place.batch_norm import BatchNorm
from superstep.model.custom.inspect import outline_of
from superstep.model.custom.units_from_modules import as_units
from superstep.model.unit import UnitGraph, mark_frozen
from superstep.numerics.noise import SamplePlace
from superstep.plan.resolution.freeze import freeze
from superstep.plan.resolution.resolve import resolve
from superstep.plan.trained_parts import FreezeConfig
from superstep.state.checkpoint import save
from superstep.state.manifest import Position
from superstep.train.proof import prove_tolerance
from superstep.train.proof.prove_tolerance import prove, write_reference
from superstep.train.weights.model import tensors_of, units_of

pytestmark = pytest.mark.multiproc

FRONT = ("model.embed*", "model.layers.0.*")
MIXED = ("model.embed*", "*norm.weight", "*.q_proj.*", "*.up_proj.*")
TOKENS = 32


def config(*, freeze=FRONT, bias=False, **found):
    made = small.config(
        layers=small.layers_for(found), packed=False, microbatch=small.microbatch_for(found), qk_norm=not bias, **found
    )
    return replace(made, freeze=FreezeConfig(params=freeze))


def _write(rank, world, run, folder):
    torch.set_num_threads(1)
    write_reference(units_of(run), run.config.train, small.batches(packed=False), Path(folder))


def _prove(rank, world, cases):
    found = []
    for run, folder in cases:
        batches = small.batches(packed=False)
        found.append(prove(World(rank, world, Device("cpu")), run, batches, Path(folder), reruns=False))
    return found


LAYOUTS = {
    1: [
        {"recompute": "full"},
        {"recompute": "selective", "freeze": MIXED},
        {"tied": False, "freeze": (*MIXED, "lm_head.*")},
    ],
    2: [
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 3, "recompute": "full", "freeze": MIXED},
        {"tp": 2, "sequence_parallel": False, "recompute": "selective"},
        {"pp": 2, "schedule": "zb-h1", "freeze": MIXED},
        {"pp": 2, "stages": (2, 4)},
        {"tp": 2, "tied": False, "freeze": MIXED},
        {"dp": 2, "zero": 2, "freeze": MIXED},
        {"cp": 2, "zero": 3},
        {"cp": 2, "context": "ulysses", "freeze": MIXED},
        {"pp": 2, "chunks": 2, "schedule": "zb-v", "freeze": ("model.layers.1.*",)},
        {"pp": 2, "chunks": 2, "schedule": "interleaved"},
    ],
    4: [{"pp": 2, "dp": 2, "zero": 2}, {"dp": 2, "tp": 2, "zero": 3, "freeze": MIXED}],
}


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory):
    """The folder of one process's results, for each model and what is frozen of it."""
    folders = {}

    def folder(run):
        key = run.shape, run.config.freeze
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp("reference"))
            pool.run(1, _write, run, folders[key])
        return folders[key]

    return folder


@pytest.mark.parametrize(("world", "part"), first_few(LAYOUTS, {1: 3, 2: 5}))
def test_layouts_train_what_one_process_trains(pool, reference, world, part):
    plans = LAYOUTS[world][part]
    runs = [resolve(config(**plan)) for plan in plans]
    verdicts = pool.run(world, _prove, [(run, reference(run)) for run in runs], timeout_s=300)[0]
    for plan, verdict in zip(plans, verdicts, strict=True):
        assert verdict.is_proven, (plan, verdict.first and verdict.first.describe())


class _Loose(Engine):
    """An engine that moves one frozen weight in each step."""

    def train_step(self, *arguments, **named):
        result = super().train_step(*arguments, **named)
        for piece in self.frozen_pieces():
            if piece.name == "model.layers.0.mlp.down_proj.weight":
                piece.values[0] += 1e-3
        return result


def _prove_loose(rank, world, run, folder):
    with mock.patch.object(prove_tolerance, "Engine", _Loose):
        return _prove(rank, world, [(run, folder)])[0].first


def test_a_frozen_weight_that_moves_is_named(pool, reference):
    run = resolve(config(dp=2, zero=1))
    first = pool.run(2, _prove_loose, run, reference(run))[0]
    assert first.name == "model.layers.0.mlp.down_proj.weight"


EXACT = {
    1: [("fp32", {"recompute": "selective"})],
    2: [
        ("fp32", {"tp": 2, "freeze": MIXED}),
        ("fp32", {"dp": 2, "zero": 3, "freeze": MIXED}),
        ("fp32", {"pp": 2, "schedule": "zb-h1"}),
        ("fp32", {"cp": 2, "freeze": MIXED}),
        ("bf16", {"tp": 2}),
        ("bf16", {"dp": 2, "zero": 1, "freeze": MIXED}),
    ],
    4: [("fp32", {"pp": 2, "dp": 2}), ("bf16", {"dp": 2, "tp": 2, "zero": 2})],
}


def exact(compute, **plan):
    found = config(compute=compute, **plan)
    data, numerics = found.data, found.numerics
    return resolve(
        replace(
            found,
            data=replace(data, sequence_tokens=TOKENS),
            numerics=replace(numerics, exact=True, exact_chunks=4),
        )
    )


@pytest.fixture(scope="module")
def bits(pool, tmp_path_factory):
    """The folder of one rank's bits, of each dtype, number of layers, microbatch, and what is frozen."""
    folders = {}

    def folder(compute, run):
        key = (compute, run.shape.layers, run.plan.microbatch, run.config.freeze)
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp("bits"))
            alone = replace(run.config, plan=replace(config().plan, microbatch=run.plan.microbatch))
            pool.run(1, write_run_bits, resolve(alone), folders[key])
        return folders[key]

    return folder


@pytest.mark.parametrize("world", many_ranks(EXACT, most=2))
def test_exact_mode_has_the_same_bits_on_every_layout(pool, bits, tmp_path, world):
    runs = [(compute, exact(compute, **plan)) for compute, plan in EXACT[world]]
    cases = [(run, bits(compute, run)) for compute, run in runs]
    verdicts = pool.run(world, prove_run_bits, cases, str(tmp_path), timeout_s=400)[0]
    for (compute, plan), verdict in zip(EXACT[world], verdicts, strict=True):
        told = [d.describe() for d in (verdict.first, verdict.first_resumed) if d]
        assert verdict.is_proven, (compute, plan, told)
        assert verdict.compared > 5_000


def _save(rank, world, run, folder):
    """Save the engine; its bytes of gradients and moments, and of those that are trained."""
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    engine = Engine(run, units_of(run), mesh)
    save(Path(folder), engine.pieces(), Position(), RankPeers(rank, world), tensors=tensors_of(engine), beside={})
    mesh.destroy()
    return engine.bytes(), sum(piece.values.nbytes for piece in engine.list_trained_pieces() if piece.kind == "weight")


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_checkpoint_has_all_weights_and_moments_of_the_trained_ones_alone(pool, tmp_path, compute):
    run = resolve(config(dp=2, zero=1, freeze=MIXED, compute=compute))
    for size, trained in pool.run(2, _save, run, str(tmp_path / "saved")):
        assert size.gradients == 2 * trained, "whole on both ranks"
        assert size.optimizer == (2 if compute == "fp32" else 3) * trained
    weights, moments = (load_file(tmp_path / "saved" / f"{name}.safetensors") for name in ("model", "optimizer"))
    names = {p.name for unit in run.outline.units for p in unit.parameters}
    trained = {p.name for unit in run.outline.units for p in unit.parameters if not p.is_frozen}
    assert set(weights) == names
    assert set(moments) == {f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in trained}
    assert trained < names


def test_a_frozen_batch_norm_uses_its_running_statistics_and_keeps_them():
    """As a torch module in evaluation does."""
    torch.manual_seed(0)
    modules = [
        torch.nn.Conv2d(1, 4, 3),
        BatchNorm(4, 8),
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)),
    ]
    specs = as_units(modules)
    outline = freeze(outline_of(specs, "own"), FreezeConfig(params=("0.*", "1.*")))
    model = UnitGraph(mark_frozen(specs, outline), seed=0)
    x = torch.randn(8, 1, 4, 4)
    out = model(x, place=SamplePlace(samples=8, is_training=True))
    out.sum().backward()
    plain = torch.nn.BatchNorm2d(4).eval()
    expected = modules[2](plain(modules[0](x)))
    torch.testing.assert_close(out, expected)
    assert {name for name, (_, p) in model.parts.items() if p.grad is not None} == {"2.1.weight", "2.1.bias"}

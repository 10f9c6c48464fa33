"""Exact mode: the same bits on every layout, from the start and from any other layout's checkpoint."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch

import small
from longer import longer
from superstep.comm.collectives import DONE
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers
from superstep.engine import executor
from superstep.engine.engine import Engine
from superstep.engine.exact import linear as exact_linear
from superstep.engine.exact import machine_check, swiglu
from superstep.engine.exact.machine_check import require_exact
from superstep.errors import ConfigError, Fault
from superstep.launch.ranks import World
from superstep.model.axes import units
from superstep.plan.resolution.resolve import resolve
from superstep.state.checkpoint import load
from superstep.train.proof import prove_exact as module
from superstep.train.proof.all_layouts import layouts
from superstep.train.proof.prove_exact import Relay, prove_exact, write_bits
from superstep.train.proof.prove_tolerance import prove, write_reference

pytestmark = pytest.mark.multiproc

TOKENS = 32


def config(kind, *, layers=4, pieces=4, **plan):
    """A run in exact mode. ``kind``: dtype, and router or head."""
    compute, model = kind.split()
    found = small.config(
        layers=layers,
        compute=compute,
        tied=model != "untied",
        packed=False,
        **{"microbatch": small.microbatch_for(plan), "sequences": 8, **plan},
    )
    if model == "untied":  # heads that the kernel takes
        found = replace(found, model=replace(found.model, head_dim=16))
    elif model != "tied":
        found = replace(
            found,
            model=replace(
                found.model, experts=4, router=model, ffn=24, shared_experts=1, balance_weight=0.2, z_weight=0.05
            ),
        )
    return replace(
        found,
        data=replace(found.data, sequence_tokens=TOKENS),
        numerics=replace(found.numerics, exact=True, exact_chunks=pieces),
    )


def _alone(kind, layers, microbatch, pieces):
    return config(kind, layers=layers, microbatch=microbatch, pieces=pieces)


def _model(kind, plan, layers=None):
    """What decides one rank's bits."""
    return kind, layers or small.layers_for(plan), small.microbatch_for(plan), small.pieces_for(plan)


def _batches():
    return small.batches(packed=False, tokens=TOKENS)


def _write(rank, world, run, folder):
    return write_bits(World(rank, world, Device("cpu")), run, _batches(), Path(folder), stop=1)


def _prove(rank, world, cases, root):
    """Each case goes on from the checkpoint of the one before it that has the same model."""
    left, verdicts = {}, []
    for number, (run, folder) in enumerate(cases):
        leave = Path(root) / f"{world}-{number}"
        relay = Relay(take=left.get(folder, Path(folder) / "checkpoint"), leave=leave, step=1)
        verdicts.append(prove_exact(World(rank, world, Device("cpu")), run, _batches(), Path(folder), relay))
        left[folder] = leave
    return verdicts


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory):
    """The folder of one rank's bits, made once for each kind, number of layers, microbatch, and number of pieces."""
    folders = {}

    def folder(*model):
        if model not in folders:
            folders[model] = str(tmp_path_factory.mktemp("bits"))
            pool.run(1, _write, resolve(_alone(*model)), folders[model])
        return folders[model]

    return folder


LAYOUTS = {
    1: [
        ("fp32 tied", {"recompute": "full"}),
        ("fp32 tied", {"recompute": "selective", "chunks": 2, "schedule": "interleaved", "microbatch_group": 2}),
        ("bf16 switch", {"recompute": "full"}),
    ],
    2: [
        ("fp32 tied", {"dp": 2, "zero": 3, "recompute": "full"}),
        ("fp32 tied", {"pp": 2, "chunks": 2, "schedule": "breadth-first", "recompute": "selective"}),
        ("fp32 tied", {"pp": 2, "schedule": "zb-h1"}),
        ("fp32 tied", {"pp": 2, "chunks": 2, "schedule": "zb-v"}),
        ("fp32 tied", {"tp": 2, "sequence_parallel": False}),
        ("fp32 tied", {"cp": 2, "context": "ulysses"}),
        ("fp32 untied", {"pp": 2, "stages": (2, 4)}),
        ("fp32 dropless", {"dp": 2, "ep": 2, "zero": 2}),
        ("fp32 dropless", {"tp": 2, "sequence_parallel": False}),
        ("bf16 switch", {"cp": 2, "ep": 2}),
        ("bf16 switch", {"tp": 2, "ep": 2}),
    ],
    4: [
        ("fp32 tied", {"pp": 4}),
        ("fp32 untied", {"tp": 4}),
        ("fp32 tied", {"cp": 4}),
        ("fp32 tied", {"dp": 4, "zero": 3, "replicas": 2}),
        ("fp32 untied", {"cp": 2, "dp": 2, "zero": 1}),
        ("bf16 untied", {"cp": 2, "tp": 2}),
        ("bf16 tied", {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb-h1"}),
        ("fp32 dropless", {"dp": 2, "tp": 2, "ep": 4}),
        ("bf16 switch", {"dp": 2, "cp": 2, "ep": 2, "zero": 3}),
    ],
}


PARTS = [(1, 2), (2, 4), *(pytest.param(world, 1, marks=pytest.mark.long) for world in (1, 2, 4))]
"""So many ranks, and of their layouts every first, every second, or every fourth."""


@pytest.mark.parametrize(("world", "every"), PARTS)
def test_layouts_give_the_same_bits(pool, reference, tmp_path, world, every):
    layouts = LAYOUTS[world][::every]
    models = [_model(kind, plan) for kind, plan in layouts]
    cases = [
        (resolve(config(model[0], layers=model[1], pieces=model[3], **plan)), reference(*model))
        for model, (_, plan) in zip(models, layouts, strict=True)
    ]
    verdicts = pool.run(world, _prove, cases, str(tmp_path), timeout_s=400)[0]
    for (kind, plan), verdict in zip(layouts, verdicts, strict=True):
        told = [d.describe() for d in (verdict.first, verdict.first_resumed) if d]
        assert verdict.is_proven, (kind, plan, told)
        assert verdict.compared > 3 * 2 * 18_000
    # A run that many ranks began goes on on one.
    for model in dict.fromkeys(models):
        last = max(number for number, one in enumerate(models) if one == model)
        take = str(tmp_path / f"{world}-{last}")
        compared, found = pool.run(1, _go_on, resolve(_alone(*model)), reference(*model), take)[0]
        assert compared > 2 * 18_000
        assert not found, (model, found[0].describe())


def _go_on(rank, world, run, folder, take):
    """What differs of the last step, as ``prove_exact`` has it; what one rank does from the start is the reference."""
    here = World(rank, world, Device("cpu"))
    mesh = build_mesh(run.plan, rank, here.device, timeout=timedelta(seconds=60))
    engine = Engine(run, units(run.shape), mesh)
    engine.note_loaded(load(Path(take), engine.pieces(), RankPeers(rank, world)).step)
    compared, found = module.follow_run(engine, mesh, run, _batches(), Path(folder), 1, here, None)
    mesh.destroy()
    return compared, found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32 tied", "bf16 tied", "fp32 dropless", "bf16 switch"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_layout_gives_the_same_bits(pool, tmp_path, world, kind):
    wanted = config(kind, microbatch=1)
    runs = list(layouts(replace(wanted, numerics=replace(wanted.numerics, exact_chunks=16)), world))
    folders = {}
    for run in runs:
        tied = run.shape.tied
        if tied not in folders:
            folders[tied] = str(tmp_path / f"{tied}")
            Path(folders[tied]).mkdir()
            alone = replace(run.config, plan=replace(wanted.plan, microbatch=1))
            pool.run(1, _write, resolve(alone), folders[tied], timeout_s=300)
    verdicts = pool.run(world, _prove, [(run, folders[run.shape.tied]) for run in runs], str(tmp_path), timeout_s=3000)
    for run, verdict in zip(runs, verdicts[0], strict=True):
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())


# Faults that no tolerance would show: each changes the last bits of some sum, and must be named.


def _left_to_right():
    def tree_sum(parts):
        total, *rest = parts
        for part in rest:
            total = total + part
        return total

    return mock.patch("superstep.numerics.invariant_matmul.tree_sum", tree_sum)


def _one_chunk():
    inner = exact_linear.add_weight_gradient
    return mock.patch.object(exact_linear, "add_weight_gradient", lambda into, grad, x, chunks: inner(into, grad, x, 1))


def _divisor_of_one_more_token():
    inner = module.train_one_step

    def step(engine, mesh, run, batch, step, inspect):
        return inner(engine, mesh, run, replace(batch, valid_tokens=batch.valid_tokens + 1), step, inspect)

    return mock.patch.object(module, "train_one_step", step)


def _torchs_own_gate():
    return mock.patch.object(swiglu, "_silu", torch.nn.functional.silu)


def _lost_replica():
    return mock.patch.object(executor, "reduce_replicas", return_value=DONE)


# The kind of value that differs first; on some processors the loss keeps its bits by luck.
FAULTS = {
    "cells summed from left to right": (_left_to_right, "fp32 tied", {"tp": 2}, "loss gradient"),
    "chunks of a weight's gradient as one product": (_one_chunk, "fp32 tied", {"dp": 2}, "gradient"),
    "a divisor of one more token": (_divisor_of_one_more_token, "fp32 tied", {"dp": 2}, "loss"),
    "a gate of torch's own": (_torchs_own_gate, "fp32 tied", {"tp": 2}, "loss gradient"),
    "replicas keep their own gradients": (_lost_replica, "fp32 tied", {"dp": 4, "zero": 1, "replicas": 2}, "gradient"),
}


def _prove_with(rank, world, name, run, folder):
    relay = Relay(take=Path(folder) / "checkpoint", leave=None, step=1)
    with FAULTS[name][0]():
        return prove_exact(World(rank, world, Device("cpu")), run, _batches(), Path(folder), relay)


@pytest.mark.parametrize("name", longer(FAULTS, lambda name: name not in list(FAULTS)[::2]))
def test_a_fault_in_the_last_bits_is_caught_and_named(pool, reference, name):
    _, kind, plan, what = FAULTS[name]
    run = resolve(config(kind, layers=2, **plan))
    folder = reference(*_model(kind, plan, layers=2))
    verdict = pool.run(run.plan.mesh.world, _prove_with, name, run, folder, timeout_s=100)[0]
    assert verdict.first is not None
    assert verdict.first.kind in what.split(), verdict.first.describe()
    assert verdict.first.name or verdict.first.kind in ("loss", "norm")
    assert verdict.first_resumed is not None


def test_exact_mode_computes_what_the_reference_does(pool, tmp_path):
    run = resolve(config("fp32 tied", layers=2, tp=2))
    torch.set_num_threads(1)
    write_reference(run.shape, run.config.train, _batches(), tmp_path)
    verdict = pool.run(2, _prove_close, run, str(tmp_path), timeout_s=100)[0]
    assert verdict.is_proven, verdict.first and verdict.first.describe()


def _prove_close(rank, world, run, folder):
    return prove(World(rank, world, Device("cpu")), run, _batches(), Path(folder), reruns=True)


def test_a_machine_that_cannot_keep_the_promise_is_refused():
    with (
        mock.patch.object(machine_check, "difference", return_value="a softmax of 7 rows has other bits than of more"),
        pytest.raises(
            ConfigError, match=r"numerics.exact = true cannot be kept .*softmax.* Set numerics.exact = false"
        ),
    ):
        require_exact("fp32", Device("cpu"))


def _steps_at(rank, world, runs, scales):
    """What becomes of one step of each run, the loss multiplied by each scale: its norm, or the fault's parts."""
    return [_of_scales(rank, run, scales) for run in runs]


def _of_scales(rank, run, scales):
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    batch, found = _batches()[0], []
    for scale in scales:
        engine = Engine(run, units(run.shape), mesh)
        try:
            valid = batch.valid_tokens / scale
            found.append(
                module.train_one_step(engine, mesh, run, replace(batch, valid_tokens=valid), 0, None).grad_norm
            )
        except Fault as fault:
            found.append((fault.message, fault.step, fault.instruction))
    mesh.destroy()
    return found


def test_a_sum_that_would_wrap_around_stops_every_rank_of_every_layout(pool):
    """A power of two changes no bit but the size, until a sum leaves its range: then all stop, at the same scale."""
    scales = [2.0**power for power in (0, 6, 9, 24)]
    layouts = [{"dp": 2, "zero": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}]
    runs = [resolve(config("fp32 tied", layers=2, microbatch=2, **plan)) for plan in ({"dp": 1}, *layouts)]
    (alone,) = pool.run(1, _steps_at, runs[:1], scales, timeout_s=200)[0]
    went = [norm for norm in alone if isinstance(norm, float)]
    assert len(went) == 3, "up to the last scale but one"
    assert went == pytest.approx([went[0] * scale / scales[0] for scale in scales[:3]], rel=1e-9)
    ranks = pool.run(2, _steps_at, runs[1:], scales[2:], timeout_s=200)
    assert ranks[0] == ranks[1], "one rank went on where another stopped"
    for plan, found in zip([{}, *layouts], [alone[2:], *ranks[0]], strict=True):
        assert found[0] == went[-1], plan
        for message, step, instruction in found[1:]:
            assert "its exact sum has room for" in message
            assert "set numerics.exact = false" in message
            assert "the gradient of " in message
            assert (step, instruction) == (1, "step")

"""Proofs of moments and master weights in fewer bits than fp32, and their faults, planted."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import small
from superstep.comm.device import Device
from superstep.engine import optimizer
from superstep.engine.flat import narrow_moments
from superstep.kernels.blocks.adamw import BlockMoment
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import resolve
from superstep.state.tensor_piece import SCALE
from superstep.train.proof import prove_exact as module
from superstep.train.proof.prove_exact import Relay, prove_exact, write_bits
from superstep.train.proof.prove_tolerance import prove, write_one_rank, write_reference

pytestmark = pytest.mark.multiproc


def config(compute, moments, master="fp32", *, exact=False, lr=5e-4, **plan):
    made = small.config(layers=2, compute=compute, exact=exact, packed=False, microbatch=2, **plan)
    return replace(
        made,
        model=replace(made.model, ffn=512, tied=plan.get("tp", 1) == 1),
        train=replace(made.train, moments=moments, lr=lr),
        numerics=replace(made.numerics, master=master),
    )


def _prove(rank, world, run, folder, one_rank):
    batches = small.batches(packed=False)
    one_rank = None if one_rank is None else Path(one_rank)
    return prove(World(rank, world, Device("cpu")), run, batches, Path(folder), reruns=False, one_rank=one_rank)


@pytest.mark.parametrize(
    ("compute", "moments", "master", "lr", "plan"),
    [
        ("fp32", "8bit", "fp32", 5e-4, {"tp": 2}),
        ("fp32", "bf16", "fp32", 5e-4, {"dp": 2, "zero": 2}),
        ("bf16", "8bit", "bf16", 5e-4, {"dp": 2, "zero": 2}),
        ("bf16", "bf16", "bf16", 1e-5, {"tp": 2}),
    ],
)
def test_fast_mode_stays_within_the_tolerance(pool, tmp_path, compute, moments, master, lr, plan):
    run = resolve(config(compute, moments, master, lr=lr, **plan))
    folder, one_rank = tmp_path / "reference", None
    folder.mkdir()
    write_reference(run.shape, run.config.train, small.batches(packed=False), folder)
    if compute == "bf16" and "dp" in plan:
        one_rank = tmp_path / "one"
        one_rank.mkdir()
        alone = resolve(config(compute, moments, master, lr=lr, dp=1))
        write_one_rank(World(0, 1, Device("cpu")), alone, small.batches(packed=False), one_rank)
    verdict = pool.run(2, _prove, run, str(folder), one_rank and str(one_rank), timeout_s=100)[0]
    assert verdict.compared > 0
    assert verdict.is_proven, verdict.first and verdict.first.describe()


def _shift_blocks(rank):
    """The second rank counts blocks as if its shard began amid one of them."""
    inner = optimizer.update_narrow

    def update(part, *others):
        if rank == 0:
            return inner(part, *others)
        moments = {}
        for name, moment in part.moments.items():
            moments[name] = replace_codes(moment, 128)
        param, grad = part.param.roll(128), part.grad.roll(128)
        inner(replace(part, param=param, grad=grad, moments=moments), *others)
        part.param.copy_(param.roll(-128))
        for name, moment in part.moments.items():
            moment.codes.copy_(moments[name].codes.roll(-128))
        return None

    def replace_codes(moment, by):
        return BlockMoment(moment.codes.roll(by), moment.scales)

    return mock.patch.object(optimizer, "update_narrow", update)


def _key_noise_by_rank(rank):
    inner = narrow_moments._draw_words
    return mock.patch.object(narrow_moments, "_draw_words", lambda piece, seed, *n: inner(piece, seed + rank, *n))


def _forget_scales(rank):
    inner = module.load

    def load(place, pieces, peers):
        return inner(place, [piece for piece in pieces if not piece.name.endswith(SCALE)], peers)

    return mock.patch.object(module, "load", load)


@contextmanager
def _plant_nothing(rank):
    yield


def _exact(rank, world, run, folder, checkpoint, plant):
    batches = small.batches(packed=False)
    with plant(rank):
        relay = Relay(take=Path(checkpoint), leave=None, step=1)
        return prove_exact(World(rank, world, Device("cpu")), run, batches, Path(folder), relay)


@pytest.mark.parametrize(
    ("plant", "moments", "master", "is_straight", "is_resumed"),
    [
        (_plant_nothing, "8bit", "bf16", True, True),
        (_plant_nothing, "bf16", "bf16", True, True),
        (_shift_blocks, "8bit", "fp32", False, False),
        (_key_noise_by_rank, "fp32", "bf16", False, False),
        (_key_noise_by_rank, "bf16", "fp32", False, True),
        (_forget_scales, "8bit", "fp32", True, False),
    ],
)
def test_each_planted_fault_changes_bits(pool, tmp_path, plant, moments, master, is_straight, is_resumed):
    compute = "bf16" if master == "bf16" else "fp32"
    run = resolve(config(compute, moments, master, exact=True, dp=2, zero=2))
    alone = resolve(config(compute, moments, master, exact=True, dp=1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    checkpoint = write_bits(World(0, 1, Device("cpu")), alone, small.batches(packed=False), tmp_path, stop=1)
    torch.set_num_threads(threads)
    verdict = pool.run(2, _exact, run, str(tmp_path), str(checkpoint), plant, timeout_s=100)[0]
    assert (verdict.first is None) == is_straight, verdict.first
    assert (verdict.first_resumed is None) == is_resumed, verdict.first_resumed


def test_a_tied_embedding_keeps_fp32_moments():
    run = resolve(config("fp32", "8bit", dp=1))
    assert run.shape.tied
    assert run.plan.narrow
    assert "model.embed_tokens.weight" not in run.plan.narrow

"""Long context: what a rank keeps for its backward pass falls as one over cp, and is what the cost model says."""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest

import small
from bench.long_context import Work, attempt, saved_bytes
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.cost.program.memory.memory import rank_bytes
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches
from superstep.model.axes import units
from superstep.numerics.dtypes import DTYPES
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step

pytestmark = pytest.mark.multiproc

TOKENS = 256
SCALARS = 64
"""Bytes of numbers that autograd keeps beside tensors, such as the state of a generator."""


def run_of(cp, *, context="ring", compute="fp32", kv_heads=8):
    config = small.config(layers=3, sequences=1, cp=cp, context=context, compute=compute)
    model = replace(config.model, kv_heads=kv_heads)
    run = resolve(replace(config, model=model, data=replace(config.data, sequence_tokens=TOKENS)), cp)
    return with_kept(run, Device("cpu"))


def _kept(rank, world, **layout):
    """The bytes that autograd saves in one step of the engine."""
    run = run_of(world, **layout)
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    engine = Engine(run, units(run.shape), mesh)
    (batch,) = small.batches(steps=1, sequences=1, tokens=TOKENS)
    mine = microbatches(batch.tokens_BS, batch.targets_BS, run.plan, mesh)
    saved, _ = saved_bytes(engine, mine, valid_tokens=batch.valid_tokens)
    mesh.destroy()
    return saved


def kept(pool, cp, **layout):
    """Of any rank, since all have the same."""
    found = set(pool.run(cp, partial(_kept, **layout)))
    assert len(found) == 1
    return found.pop()


def predicted(cp, **layout):
    """What the program's peak has of it, and the tables of the rotation, which no unit keeps for itself."""
    run = run_of(cp, **layout)
    (rank,) = rank_bytes(run, compile_step(run.plan))
    tables = 2 * TOKENS // cp * run.shape.head_dim * DTYPES[run.config.numerics.compute].itemsize
    return rank.peak.kept_bytes + tables


@pytest.mark.parametrize("layout", [{}, {"compute": "bf16"}, {"kv_heads": 2}], ids=str)
def test_around_a_ring_a_rank_keeps_one_part_in_cp(pool, layout):
    one = kept(pool, 1, **layout)
    assert one == pytest.approx(predicted(1, **layout), abs=SCALARS)
    for cp in (2, 4):
        found = kept(pool, cp, **layout)
        assert found == pytest.approx(predicted(cp, **layout), abs=SCALARS)
        assert found == pytest.approx(one / cp, rel=0.01)


@pytest.mark.parametrize("layout", [{}, {"compute": "bf16"}, {"kv_heads": 2}], ids=str)
def test_ulysses_keeps_attentions_output_twice_and_heads_that_are_too_few_in_copies(pool, layout):
    one = kept(pool, 1, **layout)
    for cp in (2, 4):
        found = kept(pool, cp, context="ulysses", **layout)
        assert found == pytest.approx(predicted(cp, context="ulysses", **layout), abs=SCALARS)
        assert one / cp < found < 1.15 * one / cp


@pytest.mark.slow
def test_four_ranks_train_a_sequence_that_does_not_fit_one():
    """At one budget of each rank, held by the operating system."""
    work, budget_bytes = Work(), 192 * 2**20
    alone = attempt(1, work, budget_bytes)
    assert alone["outcome"] == "out of memory"
    assert "can't allocate memory" in alone["refused"][0]
    four = attempt(4, work, budget_bytes)
    assert four["outcome"] == "trained"
    reference = attempt(1, work, None)["ranks"][0]["losses"]
    assert four["ranks"][0]["losses"] == pytest.approx(reference, rel=TOLERANCE["fp32"].loss)

"""Snapshots, checkpoints and evaluation of emulated GPUs: what is kept is the state, and a run goes on from it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import small
from strict_ranks import SETTINGS, gpu_of
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.plan.config import StateConfig
from superstep.plan.resolution.resolve import resolve
from superstep.state.checkpoint import load, save
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import make_memories, pieces_of
from superstep.train.proof.prove_tolerance import TIMEOUT
from superstep.train.weights.model import tensor_shapes, units_of

pytestmark = pytest.mark.strict

LAYOUTS = {
    "one": {},
    "zero 2 bf16": {"dp": 2, "zero": 2, "compute": "bf16"},
    "zero 3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2},
}
STEPS = 4


def run_of(name, every=None):
    layout = LAYOUTS[name]
    config = small.config(packed=False, **{"microbatch": 2, "layers": small.layers_for(layout), **layout})
    return resolve(replace(config, state=StateConfig(snapshot_every=every)))


def held(pieces):
    """The host's copy of pieces, by kind, name and place."""
    return {(p.kind, p.name, p.low, str(p.index)): p.values.detach().cpu().clone() for p in pieces}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def train(engine, run, batches):
    """The loss of each step."""
    found = []
    for batch in batches:
        mine = microbatches_of(batch.rows(rows(run.plan, engine.mesh)), run.plan, engine.mesh)
        found.append(engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-2).loss)
    return found


def never(flushed):
    raise AssertionError(f"nothing was wanted on disk, and of {flushed} was told")


def keep_copies(rank, world, run, settings):
    """Whether copies are the states that steps began with, and the state put back into another engine is its own."""
    batches = small.batches(steps=STEPS, packed=False)
    with gpu_of(rank, world, settings) as (gpu, report):
        mesh = build_mesh(run.plan, rank, gpu, timeout=TIMEOUT)
        engine = Engine(run, units_of(run), mesh)
        _, (memory,) = make_memories(1)
        copies = engine.keep_snapshots(memory)
        copies.lay_out(engine.pieces(), {}, {}, Path("nowhere"))
        before, kept = {}, {}
        for number, batch in enumerate(batches):
            before[number] = held(engine.pieces())
            copies.begin(Position(step=number), never, is_for_disk=False)
            train(engine, run, [batch])
        for step, slot in memory.whole().items():
            kept[step] = same(held(pieces_of(memory, slot)), before[step])
        other = Engine(run, units_of(run), mesh)
        position = other.keep_snapshots(memory).restore(STEPS - 1)
        other.note_loaded(position.step)
        is_restored = same(held(other.pieces()), before[STEPS - 1])
        goes_on = train(other, run, batches[-1:])
        is_same = same(held(other.pieces()), held(engine.pieces()))
        copies.close()
        observed = report()
        mesh.destroy()
    return kept, is_restored, is_same, observed, goes_on


@pytest.mark.parametrize("order", ["seeded", "latest"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_is_the_state_that_its_step_began_with(pool, name, order):
    run, settings = run_of(name, every=1), replace(SETTINGS, order=order, delay_us=200 if order == "seeded" else 0)
    for rank, found in enumerate(pool.run(run.plan.mesh.world, keep_copies, run, settings, timeout_s=60)):
        kept, is_restored, is_same, observed, _ = found
        assert kept == {STEPS - 2: True, STEPS - 1: True}
        assert is_restored
        assert is_same, "the step that follows has other bits"
        assert observed.races == {}
        assert observed.contexts == {rank}


def stop_and_go_on(rank, world, run, folder):
    """Losses of a run, and of one that was stopped in its midst; their states; losses of held-out text."""
    batches = small.batches(steps=STEPS, packed=False)
    with gpu_of(rank, world) as (gpu, report):
        mesh, peers = build_mesh(run.plan, rank, gpu, timeout=TIMEOUT), RankPeers(rank, world)
        whole = Engine(run, units_of(run), mesh)
        losses = train(whole, run, batches)
        first = Engine(run, units_of(run), mesh)
        went = train(first, run, batches[:2])
        shapes = dict.fromkeys(first.state_kinds, tensor_shapes(first))
        save(folder, first.pieces(), Position(step=2), peers, tensors=shapes, beside={})
        second = Engine(run, units_of(run), mesh)
        second.note_loaded(load(folder, second.pieces(), peers).step)
        went += train(second, run, batches[2:])
        texts = [microbatches_of(b.rows(rows(run.plan, mesh)), run.plan, mesh) for b in batches[:1]]
        said = [engine.evaluate(texts[0]) for engine in (whole, second)]
        is_same = same(held(whole.pieces()), held(second.pieces()))
        observed = report()
        mesh.destroy()
    return losses, went, is_same, said, observed


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_that_was_stopped_has_the_bits_of_one_that_was_not(pool, tmp_path, name):
    run = run_of(name)
    for found in pool.run(run.plan.mesh.world, stop_and_go_on, run, tmp_path / "checkpoint", timeout_s=60):
        losses, went, is_same, said, observed = found
        assert losses == went
        assert is_same
        assert said[0] == said[1]
        assert observed.races == {}

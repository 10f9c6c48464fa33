"""The memory of a whole step: what is alive after each instruction, in the engine itself, against what is predicted."""

from __future__ import annotations

from datetime import timedelta

import pytest

import small
from bench.alive import Born, Watch
from longer import longer
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.memory.memory import rank_bytes
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.model.axes import units
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.peak_memory import list_held_bytes

pytestmark = pytest.mark.multiproc


def watched(rank, world, layout):
    """Of one rank: bytes by category between steps, and after each instruction of a step what is alive beside them."""
    run = resolve(small.config(layers=3, **layout))
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    engine = Engine(run, units(run.shape), mesh)
    (batch,) = small.batches(steps=1)
    mine = microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh)
    engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3)  # makes the rotary tables
    stay = engine.bytes()
    with Born() as born:
        watch = Watch(born.noted, engine, mine)
        engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3, record=watch)
    at = mesh.at.pp
    mesh.destroy()
    return at, (stay.params, stay.gradients, stay.optimizer), watch.alive, watch.transient


LAYOUTS = [
    {"microbatch": 2},
    {"microbatch": 2, "kernels": "torch"},
    {"tp": 2, "microbatch": 2, "compute": "bf16"},
    {"microbatch": 2, "recompute": "full", "compute": "bf16"},
    {"microbatch": 2, "recompute": "selective"},
    {"microbatch": 2, "dropout": 0.2},
    {"tp": 2, "microbatch": 2, "recompute": "selective", "dropout": 0.2},
    {"pp": 2, "microbatch": 1, "schedule": "gpipe"},
    {"dp": 2, "zero": 3, "microbatch": 2, "compute": "bf16"},
    {"exact": True, "microbatch": 2, "recompute": "selective"},
    {"exact": True, "tp": 2, "microbatch": 2},
    {"pp": 2, "microbatch": 2, "schedule": "zb-h1"},
]
MORE = [
    {"pp": 2, "microbatch": 2, "compute": "bf16"},
    {"dp": 2, "zero": 2, "microbatch": 2},
    {"pp": 2, "dp": 2, "zero": 1, "microbatch": 1},
    {"exact": True, "dp": 2, "zero": 2, "microbatch": 2, "compute": "bf16"},
    {"exact": True, "pp": 2, "microbatch": 2, "schedule": "zb-h1"},
]
"""Of two settings that the layouts above have each, or of four ranks."""
SCALARS = 256
"""Bytes of losses and counts that are alive, which no category has."""


@pytest.mark.parametrize("layout", [*LAYOUTS, *longer(MORE, lambda layout: True)], ids=str)
def test_what_is_alive_after_each_instruction_is_predicted(pool, layout):
    run = with_kept(resolve(small.config(layers=3, **layout)), Device("cpu"))
    program, sizes = compile_step(run.plan), unit_bytes(run)
    ranks = rank_bytes(run, program)
    for at, stay, alive, transient in pool.run(run.plan.mesh.world, watched, layout):
        assert stay == (ranks[at].params, ranks[at].gradients, ranks[at].optimizer)
        predicted = list_held_bytes(program, at, sizes)
        for index, (after, found, gathered) in enumerate(zip(predicted, alive, transient, strict=True)):
            where = f"{index}: {program.ranks[at][index]}"
            assert after["params"] + after["gradient"] == pytest.approx(gathered, rel=0.02, abs=SCALARS), where
            assert after["kept"] + after["boundary"] == pytest.approx(found, rel=0.02, abs=SCALARS), where

"""What a rank holds is what the ZeRO stage says, by the engine's own buffers and by the process's memory."""

import ctypes
import gc
from datetime import timedelta

import psutil
import pytest

from longer import longer
from pool import give_memory_back
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.cost.program.flops import parameters
from superstep.engine.engine import Engine
from superstep.model.axes import units
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve

pytestmark = pytest.mark.multiproc


def _run(world, zero, compute):
    return resolve(
        RunConfig(
            model=ModelConfig(name="bench", layers=4, width=256, heads=4, ffn=704, vocab=8192, tied=False),
            data=DataConfig(sequence_tokens=32),
            train=TrainConfig(batch_sequences=4),
            plan=PlanConfig(dp=world, zero=zero),
            numerics=NumericsConfig(compute=compute),
        ),
        world,
    )


def _resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def _held(rank, world, zero, compute):
    give_memory_back()
    run = _run(world, zero, compute)
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    Engine(run, units(run.shape), mesh)  # what a first engine loads for good is not counted below
    before = _resident()
    engine = Engine(run, units(run.shape), mesh)
    for buffers in (b for unit in engine.buffers.values() for b in unit):
        # Zeroed memory is not resident until it is written to.
        for tensor in (buffers.gradient_shard, *buffers.moments.values()):
            tensor.fill_(1.0)
        if buffers.zero < 2:
            buffers.gradient.fill_(1.0)
    after = _resident()
    held = engine.bytes()
    mesh.destroy()
    return held, after - before


# Each stage and each dtype are met in the short run, and all pairs of them in the long one.
STAGES = [(zero, compute) for zero in range(4) for compute in ("fp32", "bf16")]


@pytest.mark.parametrize(("zero", "compute"), longer(STAGES, lambda one: (one[1] == "bf16") != bool(one[0] % 2)))
def test_buffers_are_divided_as_the_stage_says(pool, zero, compute):
    world = 4
    run = _run(world, zero, compute)
    count = parameters(run.shape)
    params, master = (4, 0) if compute == "fp32" else (2, 4)
    # With ZeRO 3 the bf16 parameters live while fetched only; what stays is the fp32 master's shard.
    at_rest = 0 if (zero == 3 and compute == "bf16") else params / (world if zero == 3 else 1)
    expected = count * (at_rest + 4 / (world if zero >= 2 else 1) + (8 + master) / (world if zero >= 1 else 1))
    for held, resident in pool.run(world, _held, zero, compute, timeout_s=60):
        total = held.params + held.gradients + held.optimizer
        assert total == pytest.approx(expected, rel=0.02)
        assert held.transient == 0
        assert resident == pytest.approx(expected, rel=0.05)

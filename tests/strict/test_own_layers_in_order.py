"""Exact mode of a user's layers on an emulated GPU: torch's kernels are asked for one order, and for all digits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from strict_ranks import gpu_of
from superstep.comm.mesh import build_mesh
from superstep.data.batch import Batch
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import example_of, microbatches_of
from superstep.model.custom.inspect import outline_of
from superstep.model.custom.units_from_modules import as_units
from superstep.plan.config import NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.plan.sample_fields import Field, SampleFields
from superstep.train.proof.prove_tolerance import TIMEOUT

pytestmark = pytest.mark.strict
ROWS = 8


def pictures():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return as_units([first, nn.Linear(36, 10)])


def flags_of_a_step(rank, world, is_exact):
    config = RunConfig(
        train=TrainConfig(batch_sequences=ROWS, warmup_steps=1, steps=10),
        plan=PlanConfig(dp=1),
        numerics=NumericsConfig(compute="fp32", exact=is_exact),
    )
    fields = SampleFields(fields=(Field("x", (1, 8, 8), "float32"), Field("target", (), "int64")), reads="x")
    run = replace(resolve(config, outline=outline_of(pictures(), "pictures")), samples=fields)
    generator = torch.Generator().manual_seed(1)
    batch = Batch({"x": torch.randn(ROWS, 1, 8, 8, generator=generator)}, torch.arange(ROWS) % 10, ROWS, reads="x")
    torch.backends.cudnn.allow_tf32 = True
    with gpu_of(rank, world) as (gpu, report):
        mesh = build_mesh(run.plan, rank, gpu, timeout=TIMEOUT)
        engine = Engine(run, pictures(), mesh, example=example_of(batch))
        engine.train_step(microbatches_of(batch, run.plan, mesh), valid_tokens=ROWS, lr=1e-3)
        flags = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32, report().races
        mesh.destroy()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.allow_tf32 = True
    return flags


@pytest.mark.parametrize("is_exact", [False, True], ids=["fast", "exact"])
def test_torch_keeps_digits_and_in_exact_mode_the_order(pool, is_exact):
    assert pool.run(1, flags_of_a_step, is_exact, timeout_s=60) == [(is_exact, False, {})]

"""A step of two phases on emulated GPUs: no race, the CPU's losses, and the predicted peak of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strict_ranks import gpu_of, peak_of_two_steps, prove_on_gpus
from superstep.comm.device import Device
from superstep.cost.program.time.predict import memory_of_phases
from superstep.data.batch import Batch
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.engine import Engine
from superstep.engine.tracing.trace_units import operations_of
from superstep.engine.values.microbatch import example_of, microbatches_of, rows
from superstep.model.by_place.batch_norm import BatchNorm
from superstep.model.custom.inspect import outline_of
from superstep.model.custom.units_from_modules import as_units
from superstep.model.unit import in_phase, list_phases
from superstep.plan.config import NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.plan.sample_fields import Field, SampleFields
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = pytest.mark.strict
ROWS, NEAR = 32, 0.05
"""``NEAR``: how far a peak may be from its prediction."""
LAYOUTS = {
    "one": {},
    "four microbatches": {"microbatch": 8},
    "dp": {"dp": 2, "zero": 1},
    "zero 2": {"dp": 2, "zero": 2, "microbatch": 8},
    "zero 3": {"dp": 2, "zero": 3, "microbatch": 8},
    "pp": {"pp": 2, "microbatch": 8},
}


class Pair(nn.Module):
    """A drawn picture, and a real one."""

    def forward(self, drawn: Tensor, real: Tensor) -> Tensor:
        return torch.stack((drawn, real), 1)


def gan():
    torch.manual_seed(0)
    judge = lambda logits, targets: (F.softplus(logits[:, 0]) + F.softplus(-logits[:, 1])).sum()  # noqa: E731
    return as_units(
        [
            nn.Sequential(nn.Linear(32, 512, bias=False), BatchNorm(512, 8), nn.ReLU()),
            nn.Sequential(nn.Linear(512, 1024), nn.Tanh()),
            Pair(),
            nn.Sequential(nn.Linear(1024, 768), nn.LeakyReLU(0.2)),
            nn.Sequential(nn.Linear(768, 1), nn.Flatten()),
        ],
        inputs={0: ["latents"], 2: [1, "pixels"]},
        loss={"judge": judge, "fool": lambda logits, targets: F.softplus(-logits[:, 0]).sum()},
        phases={"judge": (3, 4), "fool": (0, 1)},
    )


def run_of(plan):
    config = RunConfig(
        train=TrainConfig(batch_sequences=ROWS, warmup_steps=1, steps=10, lr=1e-3),
        plan=PlanConfig(**plan),
        numerics=NumericsConfig(compute="fp32"),
    )
    run = with_kept(resolve(config, outline=outline_of(gan(), "gan")), Device("cuda", 0))
    fields = (Field("latents", (32,), "float32"), Field("pixels", (1024,), "float32"), Field("target", (), "int64"))
    return replace(run, samples=SampleFields(fields=fields, reads="latents"))


def batch():
    generator = torch.Generator().manual_seed(1)
    fields = {name: torch.randn(ROWS, size, generator=generator) for name, size in (("latents", 32), ("pixels", 1024))}
    return Batch(fields, torch.zeros(ROWS, dtype=torch.long), ROWS, reads="latents")


def peak_of_steps(rank, world, run):
    """The pipeline rank, and the most bytes of the allocator over two steps, without what was there before."""
    with gpu_of(rank, world) as (gpu, report):

        def start(mesh):
            engine = Engine(run, gan(), mesh, example=example_of(batch()))
            return engine, microbatches_of(batch().rows(rows(run.plan, mesh)), run.plan, mesh), ROWS

        return peak_of_two_steps(rank, gpu, report, run, start)


def prove_here(rank, world, run, folder):
    return prove_on_gpus(rank, world, run, [batch()], folder, gan())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    write_reference(gan(), run_of({}).config.train, [batch()], folder)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_phases_are_those_of_the_reference_without_a_race(pool, reference, name):
    run = run_of(LAYOUTS[name])
    for rank, (first, observed) in enumerate(pool.run(run.plan.mesh.world, prove_here, run, reference, timeout_s=120)):
        assert not first
        assert observed.races == {}
        assert observed.contexts == {rank}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_peak_of_the_fuller_phase_is_its_prediction(pool, name):
    run = run_of(LAYOUTS[name])
    operations = tuple(
        each
        for phase, its_name in zip(run.list_phases(), list_phases(gan()), strict=True)
        for each in operations_of(phase, in_phase(gan(), its_name))
    )
    memory = memory_of_phases(run, operations)
    for at, peak in pool.run(run.plan.mesh.world, peak_of_steps, run, timeout_s=120):
        assert abs(peak / memory[at].bytes - 1) < NEAR, (at, peak, memory[at].bytes)

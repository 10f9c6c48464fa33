"""The memory of a shared encoder on emulated GPUs: the allocator's peak beside its prediction."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from picture_samples import SAMPLES, write_pictures
from strict_ranks import gpu_of, peak_of_two_steps
from superstep.cost.program.time.predict import memory_of_phases
from superstep.data.sources.source import open_source, stream_of
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.plan.config_io import read_config
from superstep.train.weights.model import operations, resolve_config, units_of

pytestmark = pytest.mark.strict
NEAR = 0.05
"""How far a peak may be from its prediction."""
WIDE = SAMPLES.replace("width=16, heads=2, ffn=24", "width=128, heads=2, ffn=256").replace(
    "width=16, heads=2, kv_heads=2, head_dim=8, ffn=32", "width=128, heads=2, kv_heads=2, head_dim=64, ffn=256"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made, before = tmp_path_factory.mktemp("pictures"), Path.cwd()
    write_pictures(made, WIDE.replace("outputs=16", "outputs=128").replace("sections=(2, 1, 1)", "sections=(16, 8, 8)"))
    os.chdir(made)
    yield made
    os.chdir(before)


def peak_of_steps(rank, world, run, folder):
    """The pipeline rank, and the most bytes of the allocator over two steps, without what was there before."""
    os.chdir(folder)
    with gpu_of(rank, world) as (gpu, report):

        def start(mesh):
            batch = stream_of(run.config, open_source(Path("pictures.py")), "train").batch(0, rows(run.plan, mesh))
            return Engine(run, units_of(run), mesh), microbatches_of(batch, run.plan, mesh), batch.valid_tokens

        return peak_of_two_steps(rank, gpu, report, run, start)


@pytest.mark.parametrize("encoder", ["front", "spread", "bubbles"])
def test_a_peak_is_its_prediction(pool, folder, encoder):
    config = read_config(folder / "run.toml")
    plan = replace(config.plan, pp=2, dp=1, zero=0, encoder=encoder, device="cuda")
    run = resolve_config(replace(config, plan=plan))
    memory = memory_of_phases(run, operations(run))
    for at, peak in pool.run(2, peak_of_steps, run, folder, timeout_s=240):
        assert abs(peak / memory[at].bytes - 1) < NEAR, (at, peak, memory[at])

"""The peak of a step of recipes with samples of their own on an emulated GPU, beside what is predicted of it."""

import re
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest

from prompts import write_prompts
from recipe_files import enter_folder
from sound_samples import SAMPLES, write_sounds
from strict_ranks import gpu_of, peak_of_two_steps
from superstep.comm.device import Device
from superstep.cost.program.memory.memory import rank_bytes
from superstep.cost.program.time.predict import sizes_of
from superstep.data.sources.source import open_source, stream_of
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of
from superstep.plan.config import PlanConfig
from superstep.plan.config_io import read_config
from superstep.program.compile import compile_step
from superstep.train.weights.model import operations, resolve_config, units_of

pytestmark = pytest.mark.strict
NEAR = 0.05


def peak_of_steps(rank, world, run, folder):
    """The most bytes of the allocator over two steps, without what was there before."""
    with chdir(folder), gpu_of(rank, world) as (gpu, report):

        def start(mesh):
            stream = stream_of(run.config, open_source(Path(str(run.config.data.source))), "train")
            batch = stream.batch(0, slice(0, run.config.train.batch_sequences))
            return Engine(run, units_of(run), mesh), microbatches_of(batch, run.plan, mesh), batch.valid_tokens

        _, peak = peak_of_two_steps(rank, gpu, report, run, start)
        return peak


def check_peak(pool, config, folder):
    """Of two steps of a run on one emulated GPU."""
    config = replace(
        config, plan=PlanConfig(dp=1, microbatch=2, device="cuda"), train=replace(config.train, batch_sequences=4)
    )
    config = replace(config, model=replace(config.model, dropout=0.0))
    run = with_kept(resolve_config(config), Device("cuda", 0))
    (predicted,) = rank_bytes(run, compile_step(run.plan), sizes_of(run, operations(run)))
    (peak,) = pool.run(1, peak_of_steps, run, folder, timeout_s=200)
    assert abs(peak / predicted.bytes - 1) < NEAR, (peak, predicted)


@pytest.mark.parametrize("name", ["audio_language", "audio_transcripts", "captioner", "flow"])
def test_a_peak_of_a_recipe_is_its_prediction(pool, name, tmp_path, monkeypatch):
    write_prompts(tmp_path / "runs" / "prompts")
    enter_folder(tmp_path, monkeypatch)
    check_peak(pool, read_config(Path(f"recipes/{name}.toml")), tmp_path)


def test_a_peak_of_qwen2_audio_is_its_prediction(pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"(width|outputs|ffn)=\d+", r"\1=128", SAMPLES)
    write_sounds(tmp_path, text.replace(": 24", ": 96").replace(": 48", ": 384"))
    check_peak(pool, read_config(Path("run.toml")), tmp_path)

"""Frozen weights in blocks on emulated GPUs: the CPU's losses, and a step's peak beside what is predicted of it."""

from dataclasses import replace
from unittest import mock

import pytest
import test_memory_of_gpus
import test_models_on_gpus

from superstep.comm.device import Device
from superstep.cost.program.memory.memory import rank_bytes
from superstep.engine.activations.saved_activations import with_kept
from superstep.kernels.packed import unpack
from superstep.plan.config import LoraConfig
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = pytest.mark.strict
NEAR = 0.03
LORA = LoraConfig(rank=4, alpha=8.0, base="nf4")
MODEL = {"width": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 384}


def with_base(run, base="nf4", **model):
    config = replace(run.config, model=replace(run.config.model, **MODEL | model), lora=replace(LORA, base=base))
    return with_kept(resolve(config), Device("cuda", 0))


@pytest.mark.parametrize("plan", [{}, {"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_layouts_train_what_the_cpu_trains(pool, tmp_path, plan):
    run = with_base(resolve(test_models_on_gpus.config(lora=True, **plan)))
    model, batches = test_models_on_gpus.both_factors_at_work(run), test_models_on_gpus.batches(run)
    write_reference(model, run.config.train, batches, tmp_path)
    for first, observed in pool.run(run.plan.mesh.world, prove_here, run, tmp_path, timeout_s=200):
        assert first is None, plan
        assert observed.races == {}, plan


def prove_here(rank, world, run, folder):
    with mock.patch.object(unpack, "_has_kernel", return_value=False):
        return test_models_on_gpus.prove_here(rank, world, run, folder)


def peak_of_steps(rank, world, run):
    """With blocks unpacked by torch: the interpreter of Triton takes minutes, and memory of its own."""
    with mock.patch.object(unpack, "_has_kernel", return_value=False):
        return test_memory_of_gpus.peak_of_steps(rank, world, run)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("base", ["nf4", "int8", None])
def test_a_peak_is_its_prediction(pool, base, compute):
    run = with_base(test_memory_of_gpus.on_gpu({"layers": 4, "compute": compute}), base=base)
    (ranks,) = rank_bytes(run, compile_step(run.plan))
    ((_, peak),) = pool.run(1, peak_of_steps, run, timeout_s=200)
    assert abs(peak / ranks.bytes - 1) < NEAR, (peak, ranks)

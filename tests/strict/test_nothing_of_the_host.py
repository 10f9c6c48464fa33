"""What a GPU is to do it does: nothing of a step or of a measurement is computed on the host, or waited for there."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

import small
from measured_operations import OPERATIONS
from operators import Operators
from strict_ranks import device_module
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.measure import probe_kernels
from superstep.engine.measure.launch_cost import launch_s
from superstep.engine.measure.probe_kernels import TimingOptions, measure_operations
from superstep.engine.values.microbatch import microbatches
from superstep.model.axes import units
from superstep.numerics.policy import PolicyLoss
from superstep.plan.config import ModelConfig
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import TIMEOUT

pytestmark = pytest.mark.strict

GPU = Device("cuda", 0)
LARGEST_BYTES = 2**16


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_measured_is_on_the_gpu(dtype, monkeypatch):
    sizes = probe_kernels.SIZES["cuda"]
    assert max(sizes) == 2**28, "its rate at 16 MiB is that of launches"
    monkeypatch.setattr(probe_kernels, "KEPT_BYTES", probe_kernels.KEPT_BYTES | {"cuda": 4 * LARGEST_BYTES})
    monkeypatch.setattr(probe_kernels, "SIZES", probe_kernels.SIZES | {"cuda": (LARGEST_BYTES // 4, LARGEST_BYTES)})
    with Operators() as operators:
        products, copies = measure_operations(OPERATIONS, dtype, TimingOptions(device=GPU, budget_s=0.0))
        launch_s(TimingOptions(device=GPU, budget_s=0.0))
    assert len(products) == 4
    assert {copy.kernel for copy in copies} == set(probe_kernels.PASSES)
    assert max(copy.bytes for copy in copies) == LARGEST_BYTES
    for name in ("mm", "_fused_adamw_", "silu", "_log_softmax", "index_select", "linalg_vector_norm"):
        assert any(name in operator for operator in operators.called), name
    assert operators.on_host == []


LAYOUTS = {
    "fp32": {},
    "bf16, recomputed": {"compute": "bf16", "recompute": "full"},
    "kept selectively": {"compute": "bf16", "recompute": "selective"},
    "exact": {},
    "experts": {"compute": "bf16"},
}
MOE = ModelConfig(name="tiny", experts=4, experts_per_token=2, router="noisy-topk")
POLICY = PolicyLoss(correction="mis", kl_coef=0.1, dual_clip=3.0)


def run_of(name):
    config = small.config(layers=2, microbatch=4, **LAYOUTS[name])  # two of each: what one hands on to the next is seen
    if name == "experts":
        config = replace(config, model=MOE)
    return resolve(replace(config, numerics=replace(config.numerics, exact=name == "exact")))


COPIES = {"aten.lift_fresh.default", "aten._pin_memory.default", "aten._to_copy.default"}
"""Numbers of Python's as tensors, pinned on their way to the GPU; and those that are read back."""

NOISE = {
    "superstep.random_words.default",
    *(f"aten.{name}.Tensor" for name in ("add", "mul")),
    *(f"aten.{name}.Scalar" for name in ("__rshift__", "bitwise_and")),
    *(f"aten.{name}.default" for name in ("cat", "cos", "log", "sqrt", "view", "zeros")),
    "aten.empty.memory_format",
}
"""Normal numbers by Box and Muller, of random words: routers draw them."""

ONCE_A_STEP = {"superstep/engine/optimizer.py": 4}
"""The loss and the norm of the gradient, of four steps."""


def by_file(waits):
    """How often the host waited, by the innermost file of the engine."""
    found = Counter()
    for where, count in waits.items():
        found[re.search(r"superstep/[^:]+", where).group()] += count
    return dict(found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_gives_a_gpu_nothing_of_the_hosts(name):
    run = run_of(name)
    mesh = build_mesh(run.plan, 0, GPU, timeout=TIMEOUT)
    engine = Engine(run, units(run.shape), mesh)
    (batch,) = small.batches(steps=1)
    mine = microbatches(batch.tokens_BS, batch.targets_BS, run.plan, mesh)
    streams = {name: torch.ones(batch.targets_BS.shape) for name in (*POLICY.reads, "weights")}
    weighed = microbatches(batch.tokens_BS, batch.targets_BS, run.plan, mesh, streams=streams)
    device_module().take_host_waits()
    step = {"valid_tokens": batch.valid_tokens, "lr": 1e-3}
    with Operators() as operators:
        for _ in range(2):
            engine.train_step(mine, **step)
        engine.train_step(weighed, **step)
        engine.train_step(weighed, **step, objective=POLICY)
        engine.logprobs(mine)
    assert len(operators.called) > 1000
    assert any("_fused_adamw_" in operator for operator in operators.called) is (name != "exact")
    # The one thing that is computed on the host and sent: noise, which has the same bits on every device.
    assert set(operators.on_host) == COPIES | (NOISE if name == "experts" else set())
    waits = by_file(device_module().take_host_waits())
    per_step = 2 if name == "exact" else 1  # the squares are whole numbers there, and so read apart from the loss
    assert waits == {where: per_step * count for where, count in ONCE_A_STEP.items()}

"""A step of the engine by the branches that a GPU takes, beside the CPU's: by the rules of CUDA's kernels, one rank."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

import small
from cuda_rules import OnCuda, as_cuda
from longer import longer
from superstep.model import experts
from superstep.model.axes import units
from superstep.plan.config import ModelConfig
from superstep.plan.resolve import resolve
from superstep.runtime.engine import Engine
from superstep.runtime.mesh import build_mesh
from superstep.train.batches import microbatches

BATCHES = small.batches(steps=2)
EXPERTS = ModelConfig(name="tiny", layers=2, experts=4, experts_per_token=2)


def told(run, device):
    """Loss and gradient norm of two steps."""
    mesh = build_mesh(run.plan, 0, device, timeout=timedelta(seconds=60))
    engine = Engine(run, units(run.shape), mesh)
    found = []
    for batch in BATCHES:
        mine = microbatches(batch.tokens_BS, batch.targets_BS, run.plan, mesh)
        step = engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3)
        found += [step.loss, step.grad_norm]
    return found


def on_cuda(run):
    """What a step tells, and what was seen of the GPU."""
    with as_cuda() as seen:
        return told(run, OnCuda("cuda", 0)), seen


@pytest.mark.parametrize("recompute", longer(["selective", "none", "full"], lambda policy: policy != "selective"))
def test_experts_by_one_kernel_give_the_digits_of_one_product_for_each(recompute, monkeypatch):
    """What selective recompute keeps may not change: it keeps the kernel's own result."""
    config = small.config(layers=2, microbatch=4, compute="bf16", recompute=recompute, kernels="torch")
    run = resolve(replace(config, model=EXPERTS))
    found, seen = on_cuda(run)
    monkeypatch.setattr(experts, "is_grouped", lambda *factors: False)
    wanted, looped = on_cuda(run)
    assert found[0] == wanted[0]
    # The one kernel rounds a weight's gradient to bf16 before it is added.
    assert found[1:] == pytest.approx(wanted[1:], rel=4e-3)
    assert "_grouped_mm" in seen.called
    assert "_grouped_mm" not in looped.called
    assert seen.waits == ["tolist"] * 2, "once a step, for the loss and the gradient's norm"

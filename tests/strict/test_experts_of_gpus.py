"""Experts as a GPU computes them: by one kernel for all, which CUDA's rules bind."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import small
from operators import Operators
from strict_ranks import device_module, gpu_of
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.parallel.expert import ExpertParallel
from superstep.engine.values.microbatch import microbatches
from superstep.model.axes import units
from superstep.model.mixture import experts
from superstep.model.mixture.expert_dispatch import DispatchContext, LocalDispatch
from superstep.model.mixture.experts import Experts, add_outer_products, grouped_linear, products, sort_by_expert
from superstep.model.moe import MixtureOfExperts
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.resolution.resolve import resolve

pytestmark = pytest.mark.strict

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KERNEL = "aten._grouped_mm.default"
ROWS = [[4, 0, 3], [0, 0, 7], [2, 5, 0], [0, 0, 0]]


@pytest.fixture(params=[(9, 0), (10, 0)], ids=["9.0", "10.0"])
def capability(request, monkeypatch):
    """Of GPUs that have the kernel. It leaves the gradient of an expert without rows unwritten on the newer one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).bfloat16()


def of_experts(rows, inputs, outputs, place, nobodys=2):
    """What experts compute of so many rows, and its gradients: output, that of the input, that of the weight."""
    x = drawn(sum(rows) + nobodys, inputs).to(place).requires_grad_()
    weight = drawn(len(rows), outputs, inputs).to(place).requires_grad_()
    grad, rows = drawn(sum(rows) + nobodys, outputs).to(place), torch.tensor(rows).to(place)
    device_module().take_host_waits()
    out = grouped_linear(x, weight, rows)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]


def waits():
    return device_module().take_host_waits()


def same(found, wanted):
    return all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_experts_without_rows_and_rows_of_nobody_get_nothing(capability, rows):
    """The kernel leaves both as it found them."""
    with Operators() as operators:
        found = of_experts(rows, 16, 8, GPU)
    assert operators.called.count(KERNEL) == 3
    assert waits() == {}
    assert same(found, of_experts(rows, 16, 8, CPU))


def test_a_rank_to_which_no_row_comes_calls_no_kernel():
    with Operators() as operators:
        found = of_experts([0, 0], 16, 8, GPU, nobodys=0)
    assert KERNEL not in operators.called
    assert waits() == {}
    assert [x.shape for x in found] == [(0, 8), (0, 16), (2, 8, 16)]
    assert same(found, of_experts([0, 0], 16, 8, CPU, nobodys=0))


@pytest.mark.parametrize(("inputs", "outputs"), [(12, 8), (16, 20), (9, 9)])
def test_widths_that_the_kernel_refuses_have_a_product_for_each_expert(inputs, outputs):
    with Operators() as operators:
        found = of_experts([4, 0, 3], inputs, outputs, GPU)
    assert KERNEL not in operators.called
    assert same(found, of_experts([4, 0, 3], inputs, outputs, CPU))


@pytest.mark.parametrize("which", [(7, 5), (8, 9), (12, 0)], ids=str)
def test_other_gpus_have_a_product_for_each_expert(which, monkeypatch):
    """Torch's own operator has it there too, after as many waits (``_grouped_mm_cuda`` in GroupedBlas.cpp)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: which)
    x, matrix, grad, rows = drawn(4, 16), drawn(2, 16, 8), drawn(4, 8), torch.tensor([1, 3])
    into = torch.zeros(2, 8, 16, device=GPU)
    with Operators() as operators:
        products(x.to(GPU), matrix.to(GPU), rows.to(GPU))
        add_outer_products(into, grad.to(GPU), x.to(GPU), rows.to(GPU))
    assert KERNEL not in operators.called


def peak_of_exchange(rank, world, rows, width):
    """The most bytes of rows that are sent to experts and back, without gradients, over those of all rows once."""
    with gpu_of(rank, world) as (gpu, _), torch.no_grad():
        layer = Experts(2, width, 8).to(gpu.torch)
        x = torch.ones(rows, width, device=gpu.torch)
        chosen = torch.arange(rows, device=gpu.torch)[:, None] % (2 * world)
        torch.cuda.synchronize()
        device_module().reset_peak(rank)
        before = torch.cuda.memory_allocated()
        ExpertParallel(dist.group.WORLD, None).run(x, chosen, layer)
        peak = device_module().statistics(rank)["allocated_bytes"]["peak"]
    return (peak - before) / (rows * width * 4)


def test_rows_on_their_way_are_held_no_longer_than_they_are_needed(pool):
    """Three times at once at most: where each expert's part of the last product is, all of it, and what came in."""
    assert max(pool.run(2, peak_of_exchange, 256, 512)) < 3.1


def test_the_host_does_not_wait_to_sort_rows():
    chosen = torch.tensor([[2, -1], [0, 2], [-1, 0]]).to(GPU)
    waits()
    order, rows = sort_by_expert(chosen, 4)
    assert waits() == {}
    assert (order.tolist(), rows.tolist()) == ([2, 5, 0, 3, 1, 4], [2, 0, 2, 0])


@pytest.mark.parametrize("router", ["dropless", "switch", "top2", "noisy-topk"])
def test_the_host_does_not_wait_for_a_block_of_experts(capability, router):
    k = {"router": router, "experts_per_token": 1 if router == "switch" else 2}
    shape = shape_of(ModelConfig(name="tiny", experts=4, width=32, heads=2, kv_heads=2, ffn=24, vocab=64, **k))
    torch.manual_seed(0)
    block = MixtureOfExperts(shape, 3).bfloat16().to(GPU)
    x = drawn(2, 6, 32).to(GPU).requires_grad_()
    exchange = LocalDispatch(DispatchContext(sequences=(0, 1), batch_sequences=2, step=5))
    waits()
    with Operators() as operators:
        block(x, exchange=exchange).sum().backward()
    assert waits() == {}
    assert operators.called.count(KERNEL) == 9
    assert all(param.grad.isfinite().all() for param in block.parameters())


def told(run):
    """Loss and gradient norm of two steps, and how often the kernel was called."""
    mesh = build_mesh(run.plan, 0, Device("cuda", 0), timeout=timedelta(seconds=60))
    engine = Engine(run, units(run.shape), mesh)
    found = []
    with Operators() as operators:
        for batch in small.batches(steps=2):
            mine = microbatches(batch.tokens_BS, batch.targets_BS, run.plan, mesh)
            step = engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3)
            found += [step.loss, step.grad_norm]
    return found, operators.called.count(KERNEL)


@pytest.mark.parametrize("recompute", ["selective", "none", "full"])
def test_experts_by_one_kernel_give_the_digits_of_one_product_for_each(recompute, monkeypatch):
    """What selective recompute keeps may not change: it keeps the kernel's own result."""
    config = small.config(layers=2, microbatch=4, compute="bf16", recompute=recompute, kernels="torch")
    run = resolve(replace(config, model=ModelConfig(name="tiny", layers=2, experts=4, experts_per_token=2)))
    found, calls = told(run)
    monkeypatch.setattr(experts, "is_grouped", lambda *factors: False)
    wanted, others = told(run)
    assert found[0] == wanted[0]
    # The one kernel rounds a weight's gradient to bf16 before it is added.
    assert found[1:] == pytest.approx(wanted[1:], rel=4e-3)
    assert calls > 0
    assert others == 0

"""Experts as a GPU computes them: by the one kernel, which CUDA's rules bind (``cuda_rules``)."""

from __future__ import annotations

import pytest
import torch

from cuda_rules import as_cuda
from superstep.model.exchange import Local, Now
from superstep.model.experts import add_outer_products, grouped_linear, products, sort_by_expert
from superstep.model.moe import MixtureOfExperts
from superstep.plan.config import ModelConfig
from superstep.plan.model.named import shape_of

ROWS = [[4, 0, 3], [0, 0, 7], [2, 5, 0], [0, 0, 0]]


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).bfloat16()


def of_experts(rows, inputs, outputs, nobodys=2):
    """What experts compute of so many rows, and its gradients: output, that of the input, that of the weight."""
    x, weight = drawn(sum(rows) + nobodys, inputs).requires_grad_(), drawn(len(rows), outputs, inputs).requires_grad_()
    out = grouped_linear(x, weight, torch.tensor(rows))
    return [out.detach(), *torch.autograd.grad(out, (x, weight), drawn(sum(rows) + nobodys, outputs))]


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("rows", ROWS)
def test_experts_without_rows_and_rows_of_nobody_get_nothing(rows):
    """The kernel leaves both as it found them."""
    wanted = of_experts(rows, 16, 8)
    with as_cuda() as seen:
        found = of_experts(rows, 16, 8)
    assert seen.called == ["_grouped_mm"] * 3
    assert not seen.waits
    assert same(found, wanted)


def test_a_rank_to_which_no_row_comes_calls_no_kernel():
    wanted = of_experts([0, 0], 16, 8, nobodys=0)
    with as_cuda() as seen:
        found = of_experts([0, 0], 16, 8, nobodys=0)
    assert not seen.called
    assert not seen.waits
    assert [x.shape for x in found] == [(0, 8), (0, 16), (2, 8, 16)]
    assert same(found, wanted)


@pytest.mark.parametrize(("inputs", "outputs"), [(12, 8), (16, 20), (9, 9)])
def test_widths_that_the_kernel_refuses_have_a_product_for_each_expert(inputs, outputs):
    wanted = of_experts([4, 0, 3], inputs, outputs)
    with as_cuda() as seen:
        found = of_experts([4, 0, 3], inputs, outputs)
    assert "_grouped_mm" not in seen.called
    assert same(found, wanted)


def test_an_older_gpu_has_a_product_for_each_expert():
    with as_cuda(capability=(7, 5)) as seen:
        products(drawn(4, 16), drawn(2, 16, 8), torch.tensor([1, 3]))
        add_outer_products(torch.zeros(2, 8, 16), drawn(4, 8), drawn(4, 16), torch.tensor([1, 3]))
    assert "_grouped_mm" not in seen.called


def test_the_host_does_not_wait_to_sort_rows():
    with as_cuda() as seen:
        order, rows = sort_by_expert(torch.tensor([[2, -1], [0, 2], [-1, 0]]), 4)
    assert not seen.waits
    assert (order.tolist(), rows.tolist()) == ([2, 5, 0, 3, 1, 4], [2, 0, 2, 0])


@pytest.mark.parametrize("router", ["dropless", "switch", "top2", "noisy-topk"])
def test_the_host_does_not_wait_for_a_block_of_experts(router):
    k = {"router": router, "experts_per_token": 1 if router == "switch" else 2}
    shape = shape_of(ModelConfig(name="tiny", experts=4, width=32, heads=2, kv_heads=2, ffn=24, vocab=64, **k))
    torch.manual_seed(0)
    block = MixtureOfExperts(shape, 3).bfloat16()
    exchange = Local(Now(sequences=(0, 1), batch_sequences=2, step=5))
    with as_cuda() as seen:
        out = block(drawn(2, 6, 32).requires_grad_(), exchange=exchange)
        out.sum().backward()
    assert not seen.waits
    assert seen.called.count("_grouped_mm") == 9
    assert all(param.grad.isfinite().all() for param in block.parameters())

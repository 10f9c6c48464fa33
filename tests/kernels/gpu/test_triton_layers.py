"""A block whose norms, gate and rotary embedding Triton computes, beside the block as it is written."""

from __future__ import annotations

import pytest
import torch

from superstep.engine.layers.fused import list_fused_layers
from superstep.engine.layers.implementation import install
from superstep.model.decoder import Block
from superstep.model.rope import Rope
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of

ALLOWED = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
"""Relative errors."""


def passed(dtype, device, *, by_triton, positions=None):
    """Output, the gradient of the input, and those of the parameters."""
    torch.manual_seed(0)
    shape = shape_of(ModelConfig(name="tiny"))
    block = Block(shape, Rope(shape))
    for name, parameter in block.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    x, grad = torch.randn(2, 2, 6, shape.width)
    block, x, grad = block.to(device, dtype), x.to(device, dtype).requires_grad_(), grad.to(device, dtype)
    if by_triton:
        chosen = [row.name for choice in install(block, list_fused_layers("triton")) for row in choice.chosen]
        assert sorted(chosen) == ["gate in Triton", "norm in Triton", "norm in Triton", "rotary embedding in Triton"]
    y = block(x, positions=positions)
    y.backward(grad)
    return [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters())]


@pytest.mark.parametrize("dtype", list(ALLOWED), ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "positions", [None, torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])], ids=["", "documents"]
)
def test_a_block_has_the_numbers_of_the_plain_one(device, dtype, positions):
    exact = passed(torch.float64, "cpu", by_triton=False, positions=positions)
    there = None if positions is None else positions.to(device)
    for mine, wanted in zip(passed(dtype, device, by_triton=True, positions=there), exact, strict=True):
        assert mine.dtype == dtype
        assert (mine.cpu().double() - wanted).norm() <= ALLOWED[dtype] * wanted.norm()

"""Blocks and heads whose steps between products the kernels take over have the numbers of plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from superstep.engine.build_modules import selective
from superstep.engine.layers.fused import FusedRotary, list_fused_layers
from superstep.engine.layers.implementation import install
from superstep.kernels import cpu_library
from superstep.model.decoder import Block, Head
from superstep.model.rope import Rope
from superstep.numerics.loss import IGNORE, linear_cross_entropy_sum
from superstep.numerics.objective import CrossEntropy, LossTarget
from superstep.plan.model.shape import ModelShape

SHAPE = ModelShape(
    family="llama",
    layers=1,
    width=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    ffn=96,
    vocab=50,
    tied=False,
    qk_norm=False,
    norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_tokens=64,
)


@pytest.fixture(autouse=True)
def library():
    if cpu_library.compile_library().library is None:
        pytest.skip(cpu_library.compile_library().why)


def block(dtype, *, is_fused, **changes):
    torch.manual_seed(0)
    shape = replace(SHAPE, **changes)
    module = Block(shape, Rope(shape))
    for name, parameter in module.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    module = module.to(dtype)
    if is_fused:
        install(module, list_fused_layers("c++"))
    return module


def passed(module, dtype, run=None, positions=None):
    """Output and gradients of a block: of its input first."""
    torch.manual_seed(1)
    x = torch.randn(2, 24, SHAPE.width).to(dtype).requires_grad_()
    out = (run or module)(x) if positions is None else module(x, positions=positions)
    grads = torch.autograd.grad(out, [x, *module.parameters()], torch.ones_like(out))
    return [t.detach().double() for t in (out, *grads)]


def far(ours, exact):
    """The largest relative error of any tensor."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": True}, {"heads": 4, "head_dim": 16}], ids=["", "qk_norm", "rope by torch"]
)
@pytest.mark.parametrize("positions", [None, torch.arange(24).flip(0), torch.arange(48).view(2, 24)])
def test_a_block_has_the_numbers_of_the_plain_one(changes, positions):
    exact = passed(block(torch.float64, is_fused=False, **changes), torch.float64, positions=positions)
    for dtype, allowed in ((torch.float32, 3e-6), (torch.bfloat16, 3e-2)):
        found = {
            way: far(passed(block(dtype, is_fused=way, **changes), dtype, positions=positions), exact)
            for way in (True, False)
        }
        assert found[True] <= allowed, found
        assert found[True] <= 1.3 * found[False] + 1e-7, "no further off than plain torch"


def test_other_angles_are_seen():
    exact = passed(block(torch.float64, is_fused=False), torch.float64)
    shifted = passed(block(torch.float32, is_fused=True), torch.float32, positions=torch.arange(24) * 2)
    assert far(shifted, exact) > 1e-3


def test_it_is_the_kernels_that_compute(monkeypatch):
    module = block(torch.float32, is_fused=True)
    assert isinstance(module.self_attn.rope, FusedRotary)
    called = []
    monkeypatch.setattr(cpu_library, "run", lambda name, *arguments: called.append(name))
    module(torch.ones(1, 4, SHAPE.width))
    assert called == ["norm", "turn", "turn", "norm", "swiglu"]


def test_a_selective_recompute_has_the_same_gradients():
    module = block(torch.bfloat16, is_fused=True)
    again = selective(lambda x, sight: module(x))
    ours, plain = passed(module, torch.bfloat16, lambda x: again(x, None)), passed(module, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def head_loss(dtype, weights=None, *, is_compiled):
    torch.manual_seed(2)
    head = Head(SHAPE).to(dtype)
    h = torch.randn(2, 9, SHAPE.width).to(dtype).requires_grad_()
    targets = torch.randint(0, SHAPE.vocab, (2, 9))
    targets[0, 3:5] = IGNORE
    aim = LossTarget(targets, {} if weights is None else {"weights": weights}, CrossEntropy())
    weight = head.lm_head.weight
    weight.grad_dtype = torch.float32 if dtype != torch.float64 else None
    loss = linear_cross_entropy_sum(
        h, weight, targets, chunk_tokens=7, scale=0.5, terms=aim.token_terms, is_compiled=is_compiled
    )
    return [t.detach().double() for t in (loss, *torch.autograd.grad(loss, (h, weight)))]


@pytest.mark.parametrize("weights", [None, torch.linspace(-1, 2, 18).view(2, 9)], ids=["plain", "weighed"])
def test_a_head_has_the_loss_of_the_plain_one(weights):
    exact = head_loss(torch.float64, weights, is_compiled=False)
    for dtype, allowed in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        assert far(head_loss(dtype, weights, is_compiled=True), exact) <= allowed

"""Triton's small kernels and their gradients, each against a few lines of torch in fp64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from superstep.kernels.gpu import cross_entropy, grouped, norm
from superstep.kernels.gpu.adamw import update
from superstep.kernels.gpu.cross_entropy import IGNORE, linear_cross_entropy_sum
from superstep.kernels.gpu.grouped import add_outer_products, products
from superstep.kernels.gpu.matmul import matmul
from superstep.kernels.gpu.norm import rms_norm
from superstep.kernels.gpu.rope import rope
from superstep.kernels.gpu.softmax import softmax
from superstep.kernels.gpu.swiglu import swiglu
from superstep.model.rope import Rope
from superstep.numerics import loss
from superstep.plan.config import ModelConfig
from superstep.plan.model.lookup import shape_of

ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Relative errors. The interpreter cuts bf16 off where a GPU rounds."""
BOTH = pytest.mark.parametrize("dtype", list(ALLOWED), ids=["fp32", "bf16"])


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape) + shape[-1])).to(dtype)


def error(found, exact):
    return float((found.cpu().double() - exact).norm() / exact.norm())


def with_gradients(compute, inputs, grad):
    """What it computes, and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def holds(ours, reference, inputs, grad, device):
    """Both on the same numbers, ``reference`` in fp64, and what they compute and its gradients compared."""
    found = with_gradients(ours, [x.to(device) for x in inputs], grad.to(device))
    exact = with_gradients(reference, [x.double() for x in inputs], grad.double())
    assert all(x.dtype == y.dtype for x, y in zip(found[1:], inputs, strict=True))
    for mine, wanted in zip(found, exact, strict=True):
        assert error(mine, wanted) <= ALLOWED[inputs[0].dtype]


@BOTH
def test_softmax(device, dtype):
    x = drawn(5, 37, dtype=dtype) * 30
    assert error(softmax(x.to(device)), x.double().softmax(1)) <= ALLOWED[dtype]
    assert error(softmax(x.to(device)[:, 3:20]), x.double()[:, 3:20].softmax(1)) <= ALLOWED[dtype]


@BOTH
def test_matmul(device, dtype):
    left, right = drawn(70, 90, dtype=dtype), drawn(40, 90, dtype=dtype)
    assert error(matmul(left.to(device), right.to(device).t()), left.double() @ right.double().t()) <= ALLOWED[dtype]


@BOTH
def test_rms_norm(device, dtype, monkeypatch):
    monkeypatch.setattr(norm, "PROGRAMS", 3)  # which have rows of unlike numbers
    inputs = drawn(2, 4, 50, dtype=dtype), 1 + drawn(50, dtype=dtype) / 4

    def reference(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * weight

    holds(lambda x, w: rms_norm(x, w, 1e-2), reference, inputs, drawn(2, 4, 50, dtype=dtype, seed=1), device)


@BOTH
def test_swiglu(device, dtype):
    inputs = drawn(3, 500, dtype=dtype), drawn(3, 500, dtype=dtype, seed=1)
    holds(swiglu, lambda g, u: F.silu(g) * u, inputs, drawn(3, 500, dtype=dtype, seed=2), device)


@BOTH
@pytest.mark.parametrize("positions", [None, torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])], ids=["places", "documents"])
def test_rope(device, dtype, positions):
    tables = Rope(shape_of(ModelConfig(name="demo", heads=3, kv_heads=3, head_dim=20))).tables
    cos, sin = tables(torch.arange(4) if positions is None else positions, torch.float32)
    inputs, grad = (drawn(2, 4, 3, 20, dtype=dtype),), drawn(2, 4, 3, 20, dtype=dtype, seed=1)

    def reference(x):
        return torch.addcmul(x * cos.double(), x.roll(10, -1), sin.double())

    holds(lambda x: rope(x, cos.to(device), sin.to(device)), reference, inputs, grad, device)


def test_rope_takes_heads_out_of_a_wider_product(device):
    cos, sin = Rope(shape_of(ModelConfig(name="demo", heads=3, kv_heads=3, head_dim=20))).tables(
        torch.arange(4), torch.float32
    )
    wide = drawn(2, 4, 5, 20)
    parts = [rope(x.to(device), cos.to(device), sin.to(device)) for x in (wide[:, :, 1:4], wide[:, :, 1:4].clone())]
    assert torch.equal(*parts)


@BOTH
def test_linear_and_cross_entropy(device, dtype, monkeypatch):
    monkeypatch.setattr(cross_entropy, "COLUMNS", 32)
    targets = torch.randint(70, (11,), generator=torch.Generator().manual_seed(0))
    targets[3] = targets[8] = IGNORE
    inputs = drawn(11, 24, dtype=dtype), drawn(70, 24, dtype=dtype)
    assert loss.IGNORE == IGNORE
    holds(
        lambda h, w: linear_cross_entropy_sum(h, w, targets.to(device), chunk_tokens=4),
        lambda h, w: F.cross_entropy(h @ w.t(), targets, ignore_index=IGNORE, reduction="sum"),
        inputs,
        torch.tensor(0.5),
        device,
    )


def test_no_more_than_a_chunk_of_the_logits_is_there(device, monkeypatch):
    seen = []
    rows = cross_entropy.losses_and_slopes
    monkeypatch.setattr(
        cross_entropy, "losses_and_slopes", lambda x, *rest: [seen.append(tuple(x.shape)), rows(x, *rest)][1]
    )
    h, weight, targets = drawn(10, 16).to(device), drawn(24, 16).to(device), torch.arange(10).to(device)
    linear_cross_entropy_sum(h, weight, targets, chunk_tokens=4)
    assert seen == [(4, 24), (4, 24), (2, 24)]


@pytest.mark.parametrize("copied", [False, True])
def test_adamw(device, copied):
    param, first, second = drawn(1500), drawn(1500, seed=1), drawn(1500, seed=2).square()
    grads = [drawn(1500, seed=seed) for seed in (3, 4)]
    mine = [x.clone().to(device) for x in (param, first, second)]
    copy = torch.empty(1500, dtype=torch.bfloat16, device=device) if copied else None
    wide = [x.double() for x in (param, first, second)]
    for step, grad in enumerate(grads, 5):
        how = {"step": step, "lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "decay": 0.1}
        update(mine[0], grad.to(device), (mine[1], mine[2]), **how, scale=0.25, copy=copy)
        torch._fused_adamw_(
            *([x] for x in (wide[0], grad.double() * 0.25, *wide[1:])), [], [torch.tensor(float(step))], lr=0.01,
            beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    assert max(error(a, b) for a, b in zip(mine, wide, strict=True)) <= 2e-7
    if copied:
        assert error(copy, wide[0]) <= ALLOWED[torch.bfloat16]


ROWS = [(0, 40, 0, 1, 23, 0), (7, 7), (0, 0, 3)]


def split(rows, total):
    ends = torch.tensor((0, *rows)).cumsum(0).tolist()
    return [slice(a, b) for a, b in pairwise(ends)], slice(ends[-1], total)


@BOTH
@pytest.mark.parametrize("rows", [ROWS[0], *(pytest.param(rows, marks=pytest.mark.long) for rows in ROWS[1:])])
def test_products_of_experts(device, dtype, rows, monkeypatch):
    monkeypatch.setattr(grouped, "SIDE", 16)
    monkeypatch.setattr(grouped, "INNER", 16)
    total = sum(rows) + 5
    x, matrix, grad = (drawn(*shape, dtype=dtype) for shape in ((total, 24), (len(rows), 24, 40), (total, 40)))
    out = products(x.to(device), matrix.to(device), torch.tensor(rows).to(device))
    back = products(grad.to(device), matrix.to(device).mT, torch.tensor(rows).to(device))
    into = torch.ones(len(rows), 40, 24).to(device)
    add_outer_products(into, grad.to(device), x.to(device), torch.tensor(rows).to(device))
    parts, nobodys = split(rows, total)
    wanted, dwanted = torch.zeros(total, 40).double(), torch.zeros(total, 24).double()
    gradient = torch.ones(len(rows), 40, 24).double()
    for expert, part in enumerate(parts):
        wanted[part], dwanted[part] = (
            x[part].double() @ matrix[expert].double(),
            grad[part].double() @ matrix[expert].double().t(),
        )
        gradient[expert] += grad[part].double().t() @ x[part].double()
    assert not out[nobodys].any()
    assert max(error(out, wanted), error(back, dwanted)) <= ALLOWED[dtype]
    assert error(into, gradient) <= ALLOWED[torch.float32]

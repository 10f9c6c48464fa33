"""Triton's small kernels and their gradients, each against a few lines of torch in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from superstep.kernels.cross_entropy import reference, reference_gradients
from superstep.kernels.gpu import cross_entropy, norm
from superstep.kernels.gpu.norm import rms_norm
from superstep.kernels.gpu.packed import unpack_rows
from superstep.kernels.gpu.rope import rope
from superstep.kernels.gpu.swiglu import swiglu
from superstep.kernels.packed.pack import BlockPlace, block_numbers, pack, scales_of, unpack_by_torch
from superstep.model.rope import Rope
from superstep.plan.block_weights import BLOCK_BYTES
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of

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
@pytest.mark.parametrize("block_format", ["nf4", "int8"])
def test_blocks_are_unpacked_to_the_bits_of_torch(device, dtype, block_format):
    blocks, scales = pack(drawn(30, 640, dtype=torch.float32), block_format)
    width = BLOCK_BYTES[block_format]
    part, place = blocks[5:25, 3 * width : 8 * width].contiguous(), BlockPlace(((5, 20),), 3, 10)
    out = torch.empty(20, 320, dtype=dtype, device=device)
    unpack_rows(part.to(device), scales_of(scales).to(device), out, *block_numbers(place)[0][2:], 10, block_format)
    wanted = unpack_by_torch(part, scales, place, block_format, torch.float32)
    if device == "cpu" and dtype == torch.bfloat16:
        wanted = (wanted.view(torch.int32) & -(2**16)).view(torch.float32)
    assert torch.equal(out.cpu(), wanted.to(dtype))


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
@pytest.mark.parametrize(("width", "columns", "temperature"), [(70, 70, 0.7), (64, 41, 1.0), (16, 0, 1.0)])
def test_rows_of_logits(device, dtype, width, columns, temperature, monkeypatch):
    """Of a whole vocabulary, of a part with padding behind it, and of padding alone."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 32)
    logits_CV, targets_C = drawn(5, width, dtype=dtype) * 8, torch.tensor([3, -100, 0, columns - 1, columns + 2])
    factor_C = torch.linspace(0.0, 2.0, 5)
    lse_C, score_C = (x.double() for x in reference(logits_CV.double(), targets_C, columns, temperature))
    there = logits_CV.to(device)
    found = cross_entropy.row_sums(there, targets_C.to(device), columns, temperature)
    torch.testing.assert_close(tuple(x.cpu().double() for x in found), (lse_C, score_C), rtol=1e-6, atol=1e-5)
    lse_C = lse_C if columns else torch.zeros(5).double()
    exact = reference_gradients(logits_CV.double(), targets_C, columns, lse_C, factor_C.double(), temperature)
    held = (x.to(device) for x in (targets_C, lse_C.float(), factor_C))
    target_C, lse, factor = held
    cross_entropy.row_gradients_(there, target_C, columns, lse, factor, temperature)
    assert not there[:, columns:].any()
    assert not there[0].any(), "of no factor there is no gradient"
    assert (there.cpu().double() - exact).norm() <= ALLOWED[dtype] * exact.norm()

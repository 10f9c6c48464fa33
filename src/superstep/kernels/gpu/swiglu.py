"""SwiGLU: silu(gate) · up, and its gradient, each number read and written once.

silu(g) = g · σ(g)    d silu / dg = σ(g) · (1 + g · (1 - σ(g)))
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 1024
"""Numbers of a program."""


@triton.jit
def _forward(gate, up, out, count, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_there = at < count
    g = tl.load(gate + at, mask=is_there, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _backward(grad, gate, up, dgate, dup, count, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_there = at < count
    d = tl.load(grad + at, mask=is_there, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=is_there, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=is_there, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dgate + at, (d * u * s * (1.0 + g * (1.0 - s))).to(dgate.dtype.element_ty), mask=is_there)
    tl.store(dup + at, (d * g * s).to(dup.dtype.element_ty), mask=is_there)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up; gradients reach both."""
    return cast(Tensor, _SwiGLU.apply(gate, up))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _forward[triton.cdiv(gate.numel(), NUMBERS),](gate, up, out, gate.numel(), NUMBERS=NUMBERS)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        _backward[triton.cdiv(count, NUMBERS),](grad.contiguous(), gate, up, dgate, dup, count, NUMBERS=NUMBERS)
        return dgate, dup

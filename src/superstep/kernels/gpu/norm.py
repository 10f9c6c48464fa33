"""RMSNorm and its gradient, each in one pass over its rows (``model.norm`` for the formulas).

T  rows    P  programs, each with every P-th row
D  width
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from superstep.kernels.gpu.language import pad_tile

PROGRAMS = 256
"""Programs of a backward pass, each with its own sum of the weight's gradient: about two for each multiprocessor."""


@triton.jit
def _forward(x, weight, out, inverse, width, eps, WIDE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    is_there = column < width
    x_D = tl.load(x + row * width + column, mask=is_there, other=0.0).to(tl.float32)
    weight_D = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(x_D * x_D, 0) / width + eps)
    tl.store(out + row * width + column, (x_D * r * weight_D).to(out.dtype.element_ty), mask=is_there)
    tl.store(inverse + row, r)


@triton.jit
def _backward(grad, x, weight, inverse, dx, dweight, rows, width, WIDE: tl.constexpr):
    column = tl.arange(0, WIDE)
    is_there = column < width
    weight_D = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    dweight_D = tl.zeros((WIDE,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + column
        x_D = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
        grad_D = tl.load(grad + at, mask=is_there, other=0.0).to(tl.float32)
        r = tl.load(inverse + row)
        shift = tl.sum(grad_D * weight_D * x_D, 0) * r * r * r / width
        tl.store(dx + at, (grad_D * weight_D * r - x_D * shift).to(dx.dtype.element_ty), mask=is_there)
        dweight_D += grad_D * x_D * r
    tl.store(dweight + tl.program_id(0) * width + column, dweight_D, mask=is_there)


def norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) · weight, [T, D], and 1 / rms(x) of each row, fp32 [T]. Both inputs are contiguous."""
    T, D = x_TD.shape
    out_TD, r_T = torch.empty_like(x_TD), x_TD.new_empty(T, dtype=torch.float32)
    _forward[T,](x_TD, weight_D, out_TD, r_T, D, eps, WIDE=pad_tile(D), num_warps=_warps(D))
    return out_TD, r_T


def norm_backward(grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, r_T: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x, in its dtype, and of the weight, fp32. All inputs are contiguous."""
    (T, D), programs = x_TD.shape, min(PROGRAMS, len(x_TD))
    dx_TD, dweight_PD = torch.empty_like(x_TD), x_TD.new_empty(programs, D, dtype=torch.float32)
    _backward[programs,](grad_TD, x_TD, weight_D, r_T, dx_TD, dweight_PD, T, D, WIDE=pad_tile(D), num_warps=_warps(D))
    return dx_TD, dweight_PD.sum(0)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dim; gradients reach both."""
    return cast(Tensor, _RMSNorm.apply(x, weight_D, eps))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_TD = x.contiguous().flatten(0, -2)
        out_TD, r_T = norm(x_TD, weight, eps)
        ctx.save_for_backward(x_TD, weight, r_T)
        return out_TD.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight, r_T = ctx.saved_tensors
        dx_TD, dweight_D = norm_backward(grad.contiguous().flatten(0, -2), x_TD, weight, r_T)
        return dx_TD.view(grad.shape), dweight_D.to(weight.dtype), None


def _warps(width: int) -> int:
    """A program has a whole row in its registers."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16

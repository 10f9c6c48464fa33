"""The rotary embedding: pairs (i, i + H/2) of a head are rotated, in one pass; the gradient is rotated back.

B  sequences    N  heads
S  positions    H  width of one head
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from superstep.kernels.gpu.language import pad_tile


@triton.jit
def _turn(
    x, cos, sin, out, positions, heads, half, x_strides, table_strides, BACK: tl.constexpr, HEADS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """All heads of a token share its angles."""
    sequence, position = tl.program_id(0).to(tl.int64) // positions, tl.program_id(0).to(tl.int64) % positions
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDE)[None, :]
    is_there = (head < heads) & (pair < half)
    x += sequence * x_strides[0] + position * x_strides[1] + head * x_strides[2] + pair
    out += (tl.program_id(0).to(tl.int64) * heads + head) * half * 2 + pair
    angle = sequence * table_strides[0] + position * table_strides[1] + half + pair  # the sine of its half has no sign
    c = tl.load(cos + angle, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=pair < half, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    one = tl.load(x, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(x + half, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out, (one * c - other * s).to(out.dtype.element_ty), mask=is_there)
    tl.store(out + half, (other * c + one * s).to(out.dtype.element_ty), mask=is_there)


def rotate(x_BSNH: Tensor, cos: Tensor, sin: Tensor, *, is_back: bool = False) -> Tensor:
    """The heads rotated by their position's angles, or back, in fp32 and rounded once: [B, S, N, H].

    Args:
        cos, sin: the tables of ``model.rope.Rope.tables``, [S, 1, H] or [B, S, 1, H]; the sine's first half is negated.
    """
    (B, S, N, H), x_BSNH = x_BSNH.shape, x_BSNH if x_BSNH.stride(-1) == 1 else x_BSNH.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out_BSNH = torch.empty(B, S, N, H, dtype=x_BSNH.dtype, device=x_BSNH.device)
    table_strides = (S * H if cos.dim() == 4 and cos.shape[0] > 1 else 0), H
    _turn[B * S,](
        *(x_BSNH, cos, sin, out_BSNH, S, N, H // 2, x_BSNH.stride()[:3], table_strides),
        BACK=is_back,
        HEADS=pad_tile(N),
        WIDE=pad_tile(H // 2),
    )
    return out_BSNH


def rope(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rotate``; the gradient reaches ``x_BSNH``."""
    return cast(Tensor, _Rope.apply(x_BSNH, cos, sin))


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return rotate(grad, *ctx.saved_tensors, is_back=True), None, None

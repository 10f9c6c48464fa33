"""RMSNorm of rows that tensor-parallel ranks share: each rank has the numbers of its heads.

y = w · x · r,   r = 1 / sqrt(Σ x² / W + eps)               Σ over the numbers of all ranks, W
dx = r · g · w - x · r³ · Σ g · w · x / W,   dw = sum over rows of g · x · r
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from superstep.comm.mesh import Group
from superstep.engine.layers.implementation import Forward
from superstep.model.norm import RMSNorm, norm_factor


class _SplitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: RMSNorm, group: Group) -> Tensor:  # noqa: ANN401
        wide, width = x.float(), x.shape[-1] * group.size()
        squares = wide.square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=group)
        r = squares.div_(width).add_(layer.eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        ctx.offset, ctx.group, ctx.width = layer.offset, group, width
        return (wide * r * norm_factor(weight.float(), layer.offset)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        x, weight, r = ctx.saved_tensors
        wide, grad, factor = x.float(), grad.float(), norm_factor(weight.float(), ctx.offset)
        scratch = grad * wide
        row = (scratch * factor).sum(-1, keepdim=True)
        dist.all_reduce(row, group=ctx.group)
        dweight = (r.flatten() @ scratch.flatten(0, -2)).to(weight.dtype)
        dx = grad * factor * r - wide * (row * r**3 / ctx.width)
        return dx.to(x.dtype), dweight, None, None


def norm_over_ranks(layer: RMSNorm, inner: Forward, group: Group) -> Forward:
    """The forward of a norm with numbers of all ranks, in the place of its own."""

    def forward(x: Tensor) -> Tensor:
        out: Tensor = _SplitNorm.apply(x, layer.weight, layer, group)  # type: ignore[no-untyped-call]
        return out

    return forward

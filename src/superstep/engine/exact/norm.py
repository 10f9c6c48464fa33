"""RMSNorm of exact mode: sums over a row that do not depend on the number of rows nor on who has the row's heads, and a
sum over rows that does not depend on their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from superstep.comm.collectives import stack_ranks
from superstep.comm.mesh import Group
from superstep.engine.exact.linear import add_tokens
from superstep.engine.layers.grad_accumulation import GradientSink
from superstep.engine.layers.implementation import Forward
from superstep.kernels import cpu_library, norm
from superstep.kernels.invariant import row_norm, row_sum
from superstep.model.norm import norm_factor


@dataclass(frozen=True, slots=True)
class NormSettings:
    """The numbers of a norm, and who has its rows.

    Attributes:
        eps: added to the mean square.
        offset: added to the weight.
        is_cut: whether tensor-parallel ranks share a row, for any degree: then torch computes it on every layout.
        group: the ranks that share it; None for one.
    """

    eps: float
    offset: float = 0.0
    is_cut: bool = False
    group: Group | None = None

    def whole(self, part: Tensor) -> Tensor:
        """The whole rows, from this rank's part of them."""
        return part if self.group is None else torch.cat(stack_ranks(part.contiguous(), self.group).unbind(), -1)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        sink: GradientSink | None,
        how: NormSettings,
    ) -> Tensor:
        out, r = _normalise(x, weight, how)
        ctx.save_for_backward(x, weight, r)
        ctx.sink, ctx.how = sink, how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        x, weight, r = ctx.saved_tensors
        how: NormSettings = ctx.how
        if how.offset == 0.0 and not how.is_cut and norm.takes(x, weight) and cpu_library.is_compiled():
            return _by_kernel(grad, x, weight, r, ctx.sink), None, None, None
        wide, grad, factor = x.float(), grad.float(), norm_factor(weight.float(), how.offset)
        scratch = grad * wide
        products = how.whole(scratch * factor)
        shift = row_sum(products) * (r * r * r) / -products.shape[-1]
        if ctx.sink is not None:
            ctx.sink.sums.do(partial(add_tokens, ctx.sink, scratch.mul_(r)))
        dx = grad * factor * r + wide * shift
        return dx.to(x.dtype), None, None, None


def _by_kernel(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor, sink: GradientSink | None) -> Tensor:
    """The same by the kernel, in one pass."""
    if sink is None:
        return norm.backward_on_grid(grad, x, weight, r, into_D=None, scale=1.0, limit=1.0)[0]
    share_D = torch.zeros_like(sink.into)
    grid = sink.grid
    dx, is_within = norm.backward_on_grid(grad, x, weight, r, into_D=share_D, scale=grid.scale, limit=grid.limit)
    if not is_within:
        grid.refuse(float((grad.float() * x.float() * r).abs().max()))
    sink.sums.do(partial(sink.into.add_, share_D))
    return dx


def _normalise(x: Tensor, weight: Tensor, how: NormSettings) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rows = how.whole(wide)
    length = row_norm(rows)
    r = 1.0 / (length * length / rows.shape[-1] + how.eps).sqrt()
    return (wide * r * norm_factor(weight.float(), how.offset)).to(x.dtype), r


def exact_norm(weight: Tensor, sink: GradientSink | None, how: NormSettings) -> Forward:
    """The new forward of an RMSNorm; its weight's gradient goes to ``sink``, if there is one."""

    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return _normalise(x, weight, how)[0]
        out: Tensor = _Norm.apply(x, weight, sink, how)  # type: ignore[no-untyped-call]
        return out

    return forward

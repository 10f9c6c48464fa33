"""Linears with adapters in fast mode: one graph for the linear and its factors, with gradients that are added directly
to the gradient buffer as in ``engine.layers.grad_accumulation``. The linear's own weight is frozen.

    T  tokens      I  inputs held here      O  outputs held here      R  rank
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from superstep.engine.layers.grad_accumulation import GradientSums
from superstep.engine.layers.implementation import Forward, Implementation
from superstep.kernels.packed.unpack import Weight, split_weight, take_matrix
from superstep.model.lora import AdaptedLinear, Mask, find_mask
from superstep.model.packed_linear import weight_of
from superstep.numerics.accumulate_product import add_product
from superstep.numerics.noise import CurrentNoise


def adapting_straight(sums: GradientSums, noise: CurrentNoise) -> tuple[Implementation, ...]:
    """The module's adapted linears. Their factors' ``.grad`` must exist."""
    return (
        Implementation(
            "linear and factors, gradients straight into the buffer",
            "lora",
            lambda path, layer: type(layer) is AdaptedLinear,
            lambda path, layer, inner: _forward(path, layer, sums, noise),
            is_whole=True,
        ),
    )


def _forward(path: str, layer: AdaptedLinear, sums: GradientSums, noise: CurrentNoise) -> Forward:
    def forward(x: Tensor) -> Tensor:
        a, b, mask = layer.lora_A.weight, layer.lora_B.weight, find_mask(path, layer, x, noise)
        weight = weight_of(layer)
        if not torch.is_grad_enabled():
            out, _ = _sum(x, weight, layer.bias, a, b, layer.scale, mask)
            return out
        factors = (a, b, a.grad, b.grad)
        result: Tensor = _Adapted.apply(x, weight, layer.bias, *factors, layer.scale, sums, mask)  # type: ignore[no-untyped-call]
        return result

    return forward


def _sum(
    x: Tensor,
    weight: Weight,
    bias_O: Tensor | None,
    a_RI: Tensor,
    b_OR: Tensor,
    scale: float,
    mask: Mask | None,
) -> tuple[Tensor, Tensor]:
    """The layer's output, and A(x): [T, R]."""
    x_TI = x.flatten(0, -2)
    h_TR = _narrow(_drop(x, mask).flatten(0, -2), a_RI.t())
    added_TO = _narrow(h_TR, b_OR.t(), scale)
    if bias_O is not None:
        added_TO += bias_O
    return torch.addmm(added_TO, x_TI, take_matrix(weight, x.dtype).t()).view(*x.shape[:-1], -1), h_TR


def _narrow(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """scale · left · right, by an operation that selective recompute repeats: it keeps the results of wide products,
    and the sum of both is one.
    """
    return torch.baddbmm(left.new_empty(()), left[None], right[None], beta=0, alpha=scale)[0]


def _drop(x: Tensor, mask: Mask | None) -> Tensor:
    return x if mask is None else mask(x)


def _add_to_a(into: Tensor, grad_TR: Tensor, x: Tensor, mask: Mask | None) -> None:
    """Add A's gradient. Dropout is applied to its input again, so that no copy of the result has to be kept."""
    add_product(into, grad_TR.t(), _drop(x, mask).flatten(0, -2))


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Weight,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        into_a: Tensor,
        into_b: Tensor,
        scale: float,
        sums: GradientSums,
        mask: Mask | None,
    ) -> Tensor:
        out, h_TR = _sum(x, weight, bias_O, a_RI, b_OR, scale, mask)
        ctx.packed, own = split_weight(weight)
        ctx.save_for_backward(x, own, a_RI, b_OR, h_TR)
        ctx.into, ctx.scale, ctx.sums, ctx.mask = (into_a, into_b), scale, sums, mask
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, own, a_RI, b_OR, h_TR = ctx.saved_tensors
        into_a, into_b = ctx.into
        grad_TO = grad.flatten(0, -2)
        grad_TR = (grad_TO @ b_OR).mul_(ctx.scale)
        ctx.sums.do(partial(add_product, into_b, grad_TO.t(), h_TR, ctx.scale))
        ctx.sums.do(partial(_add_to_a, into_a, grad_TR, x.detach(), ctx.mask))
        if not ctx.needs_input_grad[0]:
            return (None,) * 10
        weight_OI = take_matrix(ctx.packed or own, grad.dtype)
        if ctx.mask is None:
            dx = (grad_TO @ weight_OI).addmm_(grad_TR, a_RI).view_as(x)
        else:
            dx = ctx.mask((grad_TR @ a_RI).view_as(x)).add_((grad_TO @ weight_OI).view_as(x))
        return dx, None, None, None, None, None, None, None, None, None

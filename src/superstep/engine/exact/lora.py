"""Linears with adapters in exact mode: every sum in the order of ``exact.linear``, for any cut.

    y = W x, rounded      h = A dropout(x), rounded      out = scale · (B h) + y, added in fp32 and rounded once

Servers in exact mode compute the same (``serve.compute.lora_kernels``). Of a linear that is cut over tp one factor is
whole; its inputs are whole too, so that every rank has its whole gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from superstep.engine.exact.linear import ReductionCut, add_weight_gradient, forward_product
from superstep.engine.layers.grad_accumulation import GradientSink
from superstep.engine.layers.implementation import Forward
from superstep.kernels.packed.unpack import Weight, split_weight, take_matrix
from superstep.model.lora import AdaptedLinear, Mask, find_mask
from superstep.model.packed_linear import weight_of
from superstep.numerics.invariant_matmul import product
from superstep.numerics.noise import CurrentNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Cuts of a linear and its factors, the sinks of the factors' gradients, and the dropout of A's input."""

    linear: ReductionCut
    a: ReductionCut
    b: ReductionCut
    sink_a: GradientSink
    sink_b: GradientSink
    scale: float
    mask: Mask | None = None


def exact_adapted(
    path: str,
    layer: AdaptedLinear,
    cuts: tuple[ReductionCut, ReductionCut, ReductionCut],
    sinks: tuple[GradientSink, GradientSink],
    noise: CurrentNoise,
) -> Forward:
    """The layer's new forward.

    Args:
        path: of the layer in its unit.
        layer: with frozen parameters of its own.
        cuts: of it, of A and of B.
        sinks: of A and of B.
        noise: of the unit's forward.
    """
    linear, a, b = cuts
    parts = _Parts(linear=linear, a=a, b=b, sink_a=sinks[0], sink_b=sinks[1], scale=layer.scale)

    def forward(x_BSI: Tensor) -> Tensor:
        given = x_BSI, weight_of(layer), layer.bias, layer.lora_A.weight, layer.lora_B.weight
        here = replace(parts, mask=find_mask(path, layer, x_BSI, noise))
        if not torch.is_grad_enabled():
            return _sum(*given, here)[0]
        out: Tensor = _Adapted.apply(*given, here)  # type: ignore[no-untyped-call]
        return out

    return forward


def _sum(
    x_BSI: Tensor, weight: Weight, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, parts: _Parts
) -> tuple[Tensor, Tensor]:
    """The layer's output and A(x)."""
    y_BSO = forward_product(x_BSI, take_matrix(weight, x_BSI.dtype), parts.linear)
    if bias_O is not None:
        y_BSO = y_BSO + bias_O
    h_BSR = forward_product(x_BSI if parts.mask is None else parts.mask(x_BSI), a_RI, parts.a)
    added = product(h_BSR.flatten(0, -2), b_OR.t()).mul_(parts.scale)
    return added.add_(y_BSO.flatten(0, -2)).to(y_BSO.dtype).view_as(y_BSO), h_BSR


def _add_to_a(parts: _Parts, dh_BSR: Tensor, x_BSI: Tensor) -> None:
    """Add A's gradient. Dropout is applied to its input again, so that no copy of the result has to be kept."""
    x_BSI = x_BSI if parts.mask is None else parts.mask(x_BSI)
    add_weight_gradient(parts.sink_a, dh_BSR, x_BSI, parts.a.chunks)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x_BSI: Tensor,
        weight: Weight,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        parts: _Parts,
    ) -> Tensor:
        out, h_BSR = _sum(x_BSI, weight, bias_O, a_RI, b_OR, parts)
        ctx.packed, own = split_weight(weight)
        ctx.save_for_backward(x_BSI, own, a_RI, b_OR, h_BSR)
        ctx.parts = parts
        return out

    @staticmethod
    def backward(ctx: Any, grad_BSO: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x_BSI, own, a_RI, b_OR, h_BSR = ctx.saved_tensors
        parts: _Parts = ctx.parts
        grad_TO = grad_BSO.flatten(0, -2)
        dh = parts.b.find_input_gradient(grad_TO, b_OR)
        dh_BSR = dh.mul_(parts.scale).to(x_BSI.dtype).view_as(h_BSR)
        # The scale is applied to the narrow factor of B's gradient, as to that of A's.
        scaled_BSR = (h_BSR.float() * parts.scale).to(h_BSR.dtype)
        parts.sink_b.sums.do(partial(add_weight_gradient, parts.sink_b, grad_BSO, scaled_BSR, parts.b.chunks))
        parts.sink_a.sums.do(partial(_add_to_a, parts, dh_BSR, x_BSI.detach()))
        dx = None
        if ctx.needs_input_grad[0]:
            weight_OI = take_matrix(ctx.packed or own, grad_BSO.dtype)
            dx = parts.linear.find_input_gradient(grad_TO, weight_OI)
            added = product(dh_BSR.flatten(0, -2), a_RI)
            if parts.mask is not None:
                added = parts.mask(added.view_as(x_BSI)).view_as(added)
            dx = (dx + added).to(x_BSI.dtype).view_as(x_BSI)
        return dx, None, None, None, None, None

"""Linear attention in exact mode: the sums over tokens of its small parameters, and its activations.

A decay's parameters have a number for each head, the convolution a few for each number of a token. Every token adds to
their gradients on a fixed grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from superstep.engine.exact.linear import add_tokens
from superstep.engine.layers.grad_accumulation import GradientSink
from superstep.engine.layers.implementation import Forward, Implementation
from superstep.model.mixers.gated_delta import GatedDelta
from superstep.model.mixers.short_convolution import Convolve, ShortConvolution

STEEP = 20.0
"""From here on softplus is the identity, as in torch."""


def exact_delta_layers(sinks: Mapping[nn.Parameter, GradientSink]) -> tuple[Implementation, ...]:
    """Implementations of its layers, and of the sigmoid.

    Args:
        sinks: for each trained parameter, the target of its gradient.
    """

    def row(name: str, kind: type[nn.Module], build: Callable[[Any, Forward], Forward]) -> Implementation:
        def applies(path: str, layer: nn.Module) -> bool:
            own = list(layer.parameters(recurse=False))
            return isinstance(layer, kind) and all(parameter in sinks for parameter in own)

        return Implementation(name, "numerics.exact", applies, lambda path, layer, inner: build(layer, inner))

    def make_decay(layer: GatedDelta, inner: Forward) -> Forward:
        layer.decay = exact_decay(layer, sinks[layer.A_log], sinks[layer.dt_bias])  # type: ignore[method-assign]
        return inner

    return (
        row("exact gate", nn.Sigmoid, lambda layer, inner: exact_sigmoid),
        row("exact sums", ShortConvolution, lambda layer, inner: exact_convolution(layer, sinks[layer.weight])),
        row("exact sums", GatedDelta, make_decay),
    )


def exact_convolution(layer: ShortConvolution, sink: GradientSink) -> Forward:
    """The new forward of a short convolution; its weight's gradient goes to ``sink``."""

    def forward(x_BSC: Tensor, convolve: Convolve) -> Tensor:
        return convolve(x_BSC, layer.weight, lambda taps: sink.sums.do(partial(_add_taps, sink, taps)))

    return forward


def _add_taps(sink: GradientSink, taps: Iterator[tuple[int, Tensor]]) -> None:
    for tap, part in taps:
        sink.into[:, 0, tap].add_(sink.grid.put_(part).flatten(0, -2).sum(0))


def exact_decay(layer: GatedDelta, of_rate: GradientSink, of_bias: GradientSink) -> Forward:
    """The layer's new ``decay``; the gradients of ``A_log`` and ``dt_bias`` go to the sinks."""

    def decay(a_BSN: Tensor) -> Tensor:
        out: Tensor = _Decay.apply(a_BSN, layer.A_log, layer.dt_bias, of_rate, of_bias)  # type: ignore[no-untyped-call]
        return out

    return decay


class _Decay(torch.autograd.Function):
    """-e^(A_log) · softplus(a + dt_bias), by operations whose bits do not depend on an element's place."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        a: Tensor,
        log_rate: Tensor,
        bias: Tensor,
        of_rate: GradientSink,
        of_bias: GradientSink,
    ) -> Tensor:
        shifted, rate = a.float() + bias.float(), -log_rate.float().exp()
        soft = shifted.exp().log1p_().where(shifted <= STEEP, shifted)
        out = rate * soft
        ctx.save_for_backward(shifted, rate, out)
        ctx.sinks, ctx.dtype = (of_rate, of_bias), a.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # noqa: ANN401
        shifted, rate, out = ctx.saved_tensors
        of_rate, of_bias = ctx.sinks
        da = grad * rate * exact_sigmoid_of(shifted)
        of_rate.sums.do(partial(add_tokens, of_rate, grad * out))
        of_bias.sums.do(partial(add_tokens, of_bias, da.clone()))
        return da.to(ctx.dtype), None, None, None, None


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        out = exact_sigmoid_of(x.float())
        ctx.save_for_backward(out)
        ctx.dtype = x.dtype
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        out: Tensor = ctx.saved_tensors[0]
        return ((1.0 - out).mul_(out).mul_(grad.float())).to(ctx.dtype)


def exact_sigmoid_of(x: Tensor) -> Tensor:
    """By exponential and division: torch's own differs between a vector and the remainder."""
    return 1.0 / x.neg().exp_().add_(1.0)


def exact_sigmoid(x: Tensor) -> Tensor:
    """The activation of a gate."""
    out: Tensor = _Sigmoid.apply(x)  # type: ignore[no-untyped-call]
    return out

"""Exact mode's layers that have one weight, and its gradient as a sum over tokens or rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from superstep.engine.exact.experts import exact_grouped_bias, exact_grouped_linear
from superstep.engine.exact.linear import add_bias, add_tokens
from superstep.engine.layers.grad_accumulation import GradientSink
from superstep.engine.layers.implementation import Forward
from superstep.model.mixture.biased_experts import GroupedBias
from superstep.model.mixture.experts import GroupedLinear
from superstep.model.sinks import AttentionSinks, OutputBias


def exact_bias(layer: OutputBias, sink: GradientSink) -> Forward:
    """The new forward of a bias; its gradient goes to ``sink``."""
    return lambda x: add_bias(x, layer.weight, sink)


def exact_sinks(layer: AttentionSinks, sink: GradientSink) -> Forward:
    """The new forward of attention's sinks; their gradient goes to ``sink``."""

    def forward(q_BSNH: Tensor) -> Tensor:
        out: Tensor = _Sinks.apply(layer.weight, q_BSNH.shape[:3], sink)  # type: ignore[no-untyped-call]
        return out

    return forward


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: Sequence[int], sink: GradientSink) -> Tensor:  # noqa: ANN401
        ctx.sink = sink
        return weight.expand(tuple(shape))

    @staticmethod
    def backward(ctx: Any, grad_BSN: Tensor) -> tuple[None, None, None]:  # noqa: ANN401
        ctx.sink.sums.do(partial(add_tokens, ctx.sink, grad_BSN.to(torch.float32, copy=True)))
        return None, None, None


BY_WEIGHT: Mapping[type[nn.Module], Callable[[Any, GradientSink], Forward]] = {
    GroupedLinear: exact_grouped_linear,
    GroupedBias: exact_grouped_bias,
    AttentionSinks: exact_sinks,
    OutputBias: exact_bias,
}
"""The new forward of each kind of layer, from the layer and the sink of its weight."""

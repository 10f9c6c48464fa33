"""Exact mode's layers that have one weight, and its gradient as a sum over tokens or rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from superstep.comm.mesh import Group
from superstep.engine.exact.experts import exact_grouped_bias, exact_grouped_linear
from superstep.engine.exact.linear import add_bias, add_tokens
from superstep.engine.layers.grad_accumulation import GradientSink
from superstep.engine.layers.implementation import Forward
from superstep.model.decoder import SharedKey
from superstep.model.mixture.biased_experts import GroupedBias
from superstep.model.mixture.experts import GroupedLinear
from superstep.model.sinks import AttentionSinks, OutputBias
from superstep.numerics.fixed_point import ACTIVATION, Grid


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


def is_shared_key(layer: nn.Module) -> bool:
    """Whether ``exact_shared_key`` computes a layer."""
    return isinstance(layer, SharedKey)


KEY_GRID = ACTIVATION.of(2**10, "the gradient of a key that all heads share", None)
"""For as many heads."""


def exact_shared_key(layer: nn.Module, group: Group | None) -> Forward:
    """The new forward of the key that all heads share: its gradient sums over the heads of all ranks, on a grid."""

    def forward(key_BS1R: Tensor, like_BSNH: Tensor) -> Tensor:
        out: Tensor = _SharedKey.apply(key_BS1R, like_BSNH.shape[2], KEY_GRID, group)  # type: ignore[no-untyped-call]
        return out

    return forward


class _SharedKey(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key_BS1R: Tensor, heads: int, grid: Grid, group: Group | None) -> Tensor:  # noqa: ANN401
        ctx.grid, ctx.group, ctx.dtype = grid, group, key_BS1R.dtype
        return key_BS1R.expand(-1, -1, heads, -1)

    @staticmethod
    def backward(ctx: Any, grad_BSNR: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        total = ctx.grid.put_(grad_BSNR.to(torch.float32, copy=True)).sum(2, keepdim=True)
        if ctx.group is not None:
            dist.all_reduce(total, group=ctx.group)
        return ctx.grid.take(total).to(ctx.dtype), None, None, None


BY_WEIGHT: Mapping[type[nn.Module], Callable[[Any, GradientSink], Forward]] = {
    GroupedLinear: exact_grouped_linear,
    GroupedBias: exact_grouped_bias,
    AttentionSinks: exact_sinks,
    OutputBias: exact_bias,
}
"""The new forward of each kind of layer, from the layer and the sink of its weight."""

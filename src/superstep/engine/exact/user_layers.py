"""Exact mode of a user's layers: torch's own, with gradients on the grid. Those that are cut over tp are computed in
cells that no layout cuts further.

A cell is an equal part of the cut dim of the weight. A rank computes its cells one after the other, each with torch's
own layer on tensors of the same shapes, whatever the number of ranks. Sums over cells are a binary tree, of which the
upper levels are the ranks:

    cut over its output    the input's gradient
    cut over its input     the output
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.comm.collectives import stack_ranks
from superstep.comm.mesh import Group
from superstep.engine.exact.layer_settings import ExactLayers
from superstep.engine.layers.implementation import Forward, Implementation
from superstep.model.custom.is_plain import is_plain_convolution, is_plain_linear
from superstep.model.unit import UnitSpec
from superstep.numerics.invariant_matmul import tree_sum

CONVOLVE: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}


def exact_user_layers(spec: UnitSpec, exact: ExactLayers) -> tuple[Implementation, ...]:
    """Implementations of a user's layers, whose sums over a microbatch are torch's: the same bits for any layout of
    equal microbatches.
    """

    def cut_dims(path: str) -> list[int]:
        axes = spec.params[f"{path}.weight" if path else "weight"].axes
        return [dim for dim, axis in enumerate(axes) if exact.rules.cut(axis) == "tp"]

    def has_cells(path: str, layer: nn.Module) -> bool:
        is_plain = is_plain_linear(layer) or is_plain_convolution(layer)
        return exact.grain.cells > 1 and is_plain and bool(cut_dims(path))

    def in_cells(path: str, layer: nn.Module, inner: Forward) -> Forward:
        on_grid(path, layer, inner)
        cells = exact.grain.cells // (1 if exact.group is None else exact.group.size())
        return compute_in_cells(layer, cut_dims(path)[0], cells, exact.group)

    def on_grid(path: str, layer: nn.Module, inner: Forward) -> Forward:
        exact.add_all_on_grid(layer)
        return inner

    return (
        Implementation("in cells", "numerics.exact", has_cells, in_cells),
        Implementation(
            "autograd's gradient, added on the grid",
            "numerics.exact",
            lambda path, layer: exact.trains(layer),
            on_grid,
        ),
    )


def compute_in_cells(layer: Any, dim: int, cells: int, group: Group | None) -> Forward:  # noqa: ANN401
    """The forward of a linear or a convolution.

    Args:
        layer: with this rank's part of its weight and bias.
        dim: of the weight that is cut: 0 is its output, 1 its input.
        cells: of that dim on this rank.
        group: the tp ranks; None where tp = 1.
    """
    is_linear = isinstance(layer, nn.Linear)
    channels = -1 if is_linear else 1
    convolve_or_multiply = F.linear if is_linear else _convolution(layer, cells)

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = _Dense.apply(convolve_or_multiply(x.contiguous(), weight.contiguous(), bias))  # type: ignore[no-untyped-call]
        return out

    def into_own(x: Tensor) -> Tensor:
        weights = layer.weight.chunk(cells)
        biases = [None] * cells if layer.bias is None else layer.bias.chunk(cells)
        if not is_linear and layer.in_channels != layer.weight.shape[1]:  # groups of its own
            inputs = x.chunk(cells, 1)
        else:
            inputs = _Spread.apply(x, cells, group)  # type: ignore[no-untyped-call]
        return torch.cat([compute(*each) for each in zip(inputs, weights, biases, strict=True)], channels)

    def own(x: Tensor) -> Tensor:
        parts = zip(x.chunk(cells, channels), layer.weight.chunk(cells, 1), strict=True)
        out: Tensor = _Total.apply(group, *[compute(part, weight, None) for part, weight in parts])  # type: ignore[no-untyped-call]
        return out if layer.bias is None else out + layer.bias.view(-1, *[1] * (0 if is_linear else out.ndim - 2))

    return own if dim else into_own


def _convolution(layer: Any, cells: int) -> Callable[..., Tensor]:  # noqa: ANN401
    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        groups = max(1, layer.groups // cells)
        return CONVOLVE[type(layer)](x, weight, bias, layer.stride, layer.padding, layer.dilation, groups)

    return compute


def _over_ranks(total: Tensor, group: Group | None) -> Tensor:
    return total if group is None else tree_sum(stack_ranks(total, group).unbind())


class _Dense(torch.autograd.Function):
    """The identity; a gradient that is a part of a larger one is copied, so that all layouts have the same strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        return grad.contiguous()


class _Spread(torch.autograd.Function):
    """The input of each cell; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: int, group: Group | None) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.group = group
        return tuple(x.view_as(x) for _ in range(cells))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return _over_ranks(tree_sum(grads), ctx.group), None, None


class _Total(torch.autograd.Function):
    """The sum of what the cells give."""

    @staticmethod
    def forward(ctx: Any, group: Group | None, *parts: Tensor) -> Tensor:  # noqa: ANN401
        ctx.cells = len(parts)
        return _over_ranks(tree_sum(parts), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return None, *[grad] * ctx.cells

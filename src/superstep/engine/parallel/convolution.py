"""Convolutions over tensor-parallel ranks. What they do follows from their table and from the channels that arrive.

    cut over its output    a whole input enters; of a cut one the channels are gathered, so that the ranks' parts meet
    the same, in groups    each rank has groups of its own: nothing is sent
    cut over its input     each rank has a part of the sum: sum over tp, then add the bias once

A whole input of a convolution in groups is cut before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from superstep.comm.mesh import Group
from superstep.engine.layers.implementation import Forward

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
Seam: TypeAlias = Callable[[Tensor, Group], Tensor]


def convolve_into_own(
    layer: Convolution, inner: Forward, group: Group, enter: Callable[[Tensor], Tensor], gather: Seam, keep: Seam
) -> Forward:
    """The forward of a convolution cut over its output channels.

    Args:
        layer: with this rank's part of its weight and bias.
        inner: its forward so far.
        group: the tp ranks.
        enter: called with a whole input.
        gather: joins the channels of all ranks.
        keep: keeps this rank's channels of a whole input.
    """
    has_groups = layer.groups > 1
    layer.groups = layer.groups // group.size() if has_groups else 1

    def forward(x: Tensor) -> Tensor:
        is_whole = x.shape[1] == layer.in_channels
        if has_groups:
            return inner(keep(x, group) if is_whole else x)
        return inner(enter(x) if is_whole else gather(x, group))

    return forward


def convolve_own(layer: Convolution, inner: Forward, group: Group, leave: Seam) -> Forward:
    """The forward of a convolution cut over its input channels: ``leave`` sums over ranks, then the bias is added."""
    bias: nn.Parameter | None = layer._parameters["bias"]
    layer.register_parameter("bias", None)
    layer.register_parameter("bias_of_sum", bias)
    dims = layer.weight.ndim - 2

    def forward(x: Tensor) -> Tensor:
        out = leave(inner(x), group)
        return out if bias is None else out + bias.view(-1, *[1] * dims)

    return forward

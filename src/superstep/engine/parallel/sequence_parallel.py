"""A split sequence over the ranks of a group, gathered and cut without a sum: every rank has the whole tensor and its
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from superstep.comm.collectives import gather_sequence
from superstep.comm.mesh import Group


def part(x: Tensor, group: Group) -> Tensor:
    """This rank's part of the sequence: [B, S, ...] to [B, S / size, ...]."""
    return x.chunk(group.size(), dim=1)[group.rank()]


class GatherWhole(torch.autograd.Function):
    """Forward gathers the sequence; the gradient is whole already, and each rank keeps its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return part(grad, ctx.group).contiguous(), None


class KeepOwn(torch.autograd.Function):
    """Forward keeps this rank's part of the sequence, backward gathers the parts of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return part(x, group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gather_sequence(grad, ctx.group), None

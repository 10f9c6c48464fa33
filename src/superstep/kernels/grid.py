"""Sums on a fixed grid, whose integers are the same by any code: the kernel for a CPU of ``numerics.fixed_point``."""

from __future__ import annotations

import torch
from torch import Tensor

from superstep.kernels import fused


def takes(into: Tensor, values: Tensor) -> bool:
    """Whether the kernel computes it."""
    return (
        into.device.type == values.device.type == "cpu"
        and (into.dtype, values.dtype) == (torch.int64, torch.float32)
        and into.shape == values.shape
        and into.is_contiguous()
        and values.is_contiguous()
        and fused.compiled().library is not None
    )


def add(into: Tensor, values: Tensor, *, scale: float, limit: float) -> bool:
    """``into += values · scale``, cut off to integers; whether every value is a number below the limit in size.

    Args:
        into: int64, and ``takes`` it with the values.
        values: fp32, which stay as they are.
        scale: a power of two.
        limit: likewise.
    """
    wrong = torch.zeros(1, dtype=torch.int64)
    fused.run("add_to_grid", into, values, values.numel(), float(scale), float(limit), wrong)
    return not wrong.item()

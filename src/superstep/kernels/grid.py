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
        and fused.is_compiled()
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


def takes_products(into_OI: Tensor, grad_BSO: Tensor, x_BSI: Tensor) -> bool:
    """Whether the kernel computes ``add_products``."""
    return (
        fused.takes(grad_BSO, x_BSI)
        and into_OI.dtype == torch.int64
        and x_BSI.shape[-1] % fused.LANES == 0
        and all(x.stride(-1) == 1 for x in (into_OI, grad_BSO, x_BSI))
        and fused.is_compiled()
    )


def add_products(into_OI: Tensor, grad_BSO: Tensor, x_BSI: Tensor, *, chunks: int, scale: float, limit: float) -> bool:
    """``into += gradᵀ · x``, of each chunk of the tokens one product, put on the grid; whether every element of each
    product was a number below the limit in size.

    An element is summed over its chunk's tokens, in the order of sequences and then of tokens, in fp32: it depends on
    nothing but its row of ``grad`` and its column of ``x``.

    Args:
        into_OI: int64, and ``takes_products`` it with the others.
        grad_BSO: fp32 or bf16.
        x_BSI: likewise.
        chunks: parts of the tokens, S, that have as many each.
        scale: a power of two.
        limit: likewise.
    """
    sequences, tokens, outputs = grad_BSO.shape
    wrong = torch.zeros(1, dtype=torch.int64)
    factors: tuple[fused.Argument, ...] = (grad_BSO, *grad_BSO.stride()[:2], x_BSI, *x_BSI.stride()[:2])
    sizes = (sequences, tokens, chunks, outputs, x_BSI.shape[-1])
    is_bf16 = grad_BSO.dtype == torch.bfloat16
    grid = (float(scale), float(limit), wrong)
    fused.run("add_products_to_grid", is_bf16, into_OI, into_OI.stride(0), *factors, *sizes, *grid)
    return not wrong.item()

"""Sums on a fixed grid: the CPU kernel of ``numerics.fixed_point``; its integers are the same in any code."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from superstep.kernels import cpu_library


def takes(into: Tensor, values: Tensor) -> bool:
    return (
        into.device.type == values.device.type == "cpu"
        and (into.dtype, values.dtype) == (torch.int64, torch.float32)
        and into.shape == values.shape
        and into.is_contiguous()
        and values.is_contiguous()
        and cpu_library.is_compiled()
    )


def add(into: Tensor, values: Tensor, *, scale: float, limit: float) -> bool:
    """``into += values · scale``, cut off to integers; returns whether every value was a number below the limit in
    size.

    Args:
        into: int64.
        values: fp32, not changed.
        scale, limit: powers of two.
    """
    wrong = torch.zeros(1, dtype=torch.int64)
    cpu_library.run("add_to_grid", into, values, values.numel(), float(scale), float(limit), wrong)
    return not wrong.item()


def takes_products(into: Tensor, grad: Tensor, x: Tensor) -> bool:
    """Whether the kernel adds them: never by a shape, which a layout cuts, as torch's products sum in another order."""
    return (
        cpu_library.takes(grad, x) and into.dtype == torch.int64 and into.stride(-1) == 1 and cpu_library.is_compiled()
    )


def add_products(into_OI: Tensor, grad_BSO: Tensor, x_BSI: Tensor, *, chunks: int, scale: float, limit: float) -> bool:
    """``into += gradᵀ · x``, one product for each chunk of the tokens, put on the grid; returns whether every element
    of each product was a number below the limit in size.

    An element is summed over its chunk's tokens, in the order of sequences and then of tokens, in fp32: it depends only
    on its row of ``grad`` and its column of ``x``.

    Args:
        into_OI: int64.
        grad_BSO, x_BSI: fp32 or bf16.
        chunks: equal parts of the tokens, S.
        scale, limit: powers of two.
    """
    grad_BSO, x_BSI = _fill_lanes(grad_BSO, 1), _fill_lanes(x_BSI, cpu_library.LANES)
    sequences, tokens, _ = grad_BSO.shape
    begins = [_begins(sequences, tokens, chunks, *each.stride()[:2]) for each in (grad_BSO, x_BSI)]
    starts = _begins(1, chunks + 1, 1, 0, sequences * tokens // chunks)
    return _add(into_OI.unsqueeze(0), (grad_BSO, begins[0]), (x_BSI, begins[1]), starts, (scale, limit))


def add_grouped_products(
    into_EOI: Tensor, grad_RO: Tensor, x_RI: Tensor, order_R: Tensor, starts: Tensor, *, scale: float, limit: float
) -> bool:
    """The same for many weights at once, each with the same number of chunks of its own rows.

    Args:
        into_EOI: int64.
        grad_RO, x_RI: fp32 or bf16.
        order_R: the rows, chunk after chunk, and the chunks weight after weight: int64.
        starts: the begin of each chunk in that order, and the end of the last: int64 [E · chunks + 1].
        scale, limit: powers of two.
    """
    factors = _fill_lanes(grad_RO, 1), _fill_lanes(x_RI, cpu_library.LANES)
    grad, x = ((each, order_R * each.stride(0)) for each in factors)
    return _add(into_EOI, grad, x, starts, (scale, limit))


def _add(
    into_EOI: Tensor,
    grad: tuple[Tensor, Tensor],
    x: tuple[Tensor, Tensor],
    starts: Tensor,
    grid: tuple[float, float],
) -> bool:
    """Each factor comes with the begins of its rows, in numbers; columns of ``x`` that ``into`` has not are zeros."""
    experts, outputs, inputs = into_EOI.shape
    if x[0].shape[-1] != inputs:
        wide = into_EOI.new_zeros(experts, outputs, x[0].shape[-1])
        is_right = _add(wide, grad, x, starts, grid)
        into_EOI.add_(wide[..., :inputs])
        return is_right
    wrong = torch.zeros(1, dtype=torch.int64)
    into: tuple[cpu_library.Argument, ...] = into_EOI, *into_EOI.stride()[:2]
    sizes = experts, (len(starts) - 1) // experts, outputs, inputs
    scale, limit = grid
    is_bf16 = grad[0].dtype == torch.bfloat16
    cpu_library.run(
        "add_products_to_grid", is_bf16, *into, *grad, *x, starts, *sizes, float(scale), float(limit), wrong
    )
    return not wrong.item()


def _fill_lanes(factor: Tensor, lanes: int) -> Tensor:
    """A factor with dense rows, and columns of zeros up to a multiple of ``lanes``."""
    missing = -factor.shape[-1] % lanes
    return pad(factor, (0, missing)) if missing else factor if factor.stride(-1) == 1 else factor.contiguous()


@lru_cache(maxsize=64)
def _begins(sequences: int, tokens: int, chunks: int, batch_stride: int, token_stride: int) -> Tensor:
    """The begins of each chunk's rows: [chunk, sequence, token of it], flat."""
    begins_BS = torch.arange(sequences)[:, None] * batch_stride + torch.arange(tokens) * token_stride
    return begins_BS.view(sequences, chunks, -1).transpose(0, 1).flatten()

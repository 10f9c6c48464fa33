"""Grouped products of experts: each one's rows times its own matrix, in one launch, with nothing read back.

    E  experts    I, O  inputs and outputs of a product
    R  rows, sorted by expert; those behind the last expert's belong to nobody

Nobody is a group behind the experts', whose product is 0. A program finds by itself of which group its tile of rows
is: a group of n rows has ceil(n / SIDE) tiles, and all E + 1 groups together at most ceil(R / SIDE) + E.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from superstep.kernels.gpu.language import dot, padded

SIDE, INNER = 64, 32
"""Rows and columns of a tile, and what it sums over at a time."""


@triton.jit
def _group(counts, experts, rows, tile, SIDE: tl.constexpr, GROUPS: tl.constexpr):
    """The expert of a tile of rows, where the tile begins, and where its group ends: before that, if there is none."""
    group = tl.arange(0, GROUPS)
    count = tl.load(counts + group, mask=group < experts, other=0).to(tl.int32)
    count = tl.where(group == experts, rows - tl.sum(count, 0), count)
    tiles = tl.cdiv(count, SIDE)
    last_tile, last_row = tl.cumsum(tiles, 0), tl.cumsum(count, 0)
    mine = tl.sum((last_tile <= tile).to(tl.int32), 0)
    is_mine = group == mine
    end = tl.sum(tl.where(is_mine, last_row, 0), 0)
    first_tile = tl.sum(tl.where(is_mine, last_tile - tiles, 0), 0)
    begin = tl.sum(tl.where(is_mine, last_row - count, 0), 0) + (tile - first_tile) * SIDE
    return mine, begin, end


@triton.jit
def _products(
    x, matrix, out, counts, experts, rows, inputs, outputs, x_strides, matrix_strides, SIDE: tl.constexpr,
    INNER: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    expert, begin, end = _group(counts, experts, rows, tl.program_id(0), SIDE, GROUPS)
    row, column = begin + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    x += row[:, None].to(tl.int64) * x_strides[0]
    matrix += tl.cast(expert, tl.int64) * matrix_strides[0]
    total = tl.zeros((SIDE, SIDE), tl.float32)
    if expert < experts:
        for first in range(0, inputs, INNER):
            at = first + tl.arange(0, INNER)
            x_RI = tl.load(
                x + at[None, :] * x_strides[1], mask=(row < end)[:, None] & (at < inputs)[None, :], other=0.0
            )
            matrix_IO = tl.load(
                matrix + at[:, None] * matrix_strides[1] + column[None, :] * matrix_strides[2],
                mask=(at < inputs)[:, None] & (column < outputs)[None, :],
                other=0.0,
            )
            total = dot(x_RI, matrix_IO, total)
    tl.store(
        out + row[:, None].to(tl.int64) * outputs + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < end)[:, None] & (column < outputs)[None, :],
    )


@triton.jit
def _outer_products(
    grad, x, into, counts, experts, inputs, outputs, grad_strides, x_strides, SIDE: tl.constexpr, INNER: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    expert, group = tl.program_id(2), tl.arange(0, GROUPS)
    count = tl.load(counts + group, mask=group < experts, other=0).to(tl.int32)
    end = tl.sum(tl.where(group <= expert, count, 0), 0)
    begin = tl.sum(tl.where(group < expert, count, 0), 0)
    output, input = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for first in range(begin, end, INNER):
        row = first + tl.arange(0, INNER)
        at = row.to(tl.int64)
        grad_OR = tl.load(
            grad + at[None, :] * grad_strides[0] + output[:, None] * grad_strides[1],
            mask=(output < outputs)[:, None] & (row < end)[None, :],
            other=0.0,
        )
        x_RI = tl.load(
            x + at[:, None] * x_strides[0] + input[None, :] * x_strides[1],
            mask=(row < end)[:, None] & (input < inputs)[None, :],
            other=0.0,
        )
        total = dot(grad_OR, x_RI, total)
    into += (tl.cast(expert, tl.int64) * outputs + output[:, None]) * inputs + input[None, :]
    is_there = (output < outputs)[:, None] & (input < inputs)[None, :]
    before = tl.load(into, mask=is_there, other=0.0).to(tl.float32)
    tl.store(into, (before + total).to(into.dtype.element_ty), mask=is_there)


def products(x_RI: Tensor, matrix_EIO: Tensor, rows_E: Tensor) -> Tensor:
    """Each expert's rows times its matrix, [R, O]: summed in fp32, rounded once; zeros for rows of nobody."""
    (R, I), (E, _, O) = x_RI.shape, matrix_EIO.shape  # noqa: E741
    out_RO = torch.empty(R, O, dtype=x_RI.dtype, device=x_RI.device)
    _products[triton.cdiv(R, SIDE) + E, triton.cdiv(O, SIDE)](
        *(x_RI, matrix_EIO, out_RO, rows_E, E, R, I, O, x_RI.stride(), matrix_EIO.stride()),
        SIDE=SIDE,
        INNER=INNER,
        GROUPS=padded(E + 1),
    )
    return out_RO


def add_outer_products(into_EOI: Tensor, grad_RO: Tensor, x_RI: Tensor, rows_E: Tensor) -> None:
    """Add each expert's gradᵀ · x, summed in fp32, to its part of ``into_EOI``, which is contiguous."""
    E, O, I = into_EOI.shape  # noqa: E741
    _outer_products[triton.cdiv(O, SIDE), triton.cdiv(I, SIDE), E](
        *(grad_RO, x_RI, into_EOI, rows_E, E, I, O, grad_RO.stride(), x_RI.stride()),
        SIDE=SIDE,
        INNER=INNER,
        GROUPS=padded(E),
    )

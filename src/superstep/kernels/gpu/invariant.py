"""Products and sums of rows for exact mode: an element's bits depend only on its own row and column.

    out_bMN = left_bMK · right_bKN        tiles of one size for every shape, K from front to back
    total_R = sum over C of rows_RC       one program a row, blocks of columns from front to back

cuBLAS and torch's reductions choose a kernel by the shape, and with it the order of the sum. On an H200 a product of 2
rows over an inner dim of 8 has other bits in cuBLAS than the same rows among 192.

    b  products side by side      M, N, K  rows, columns, and the dim that is summed over
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from superstep.kernels.gpu.language import dot

SIDE = 64
"""Rows and columns of a tile."""

DEPTH = 32
"""The part of K in one step of a tile."""

COLUMNS = 1024
"""Columns of a row that are added at once."""


@triton.jit
def _product(
    left, right, out, rows, columns, inner, left_strides, right_strides, SIDE: tl.constexpr, DEPTH: tl.constexpr
):
    batch = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    column = (tl.program_id(1) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    left += batch * left_strides[0]
    right += batch * right_strides[0]
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for first in range(0, inner, DEPTH):
        at = (first + tl.arange(0, DEPTH)).to(tl.int64)
        left_places = left + row[:, None] * left_strides[1] + at[None, :] * left_strides[2]
        right_places = right + at[:, None] * right_strides[1] + column[None, :] * right_strides[2]
        left_tile = tl.load(left_places, mask=(row[:, None] < rows) & (at[None, :] < inner), other=0.0)
        right_tile = tl.load(right_places, mask=(at[:, None] < inner) & (column[None, :] < columns), other=0.0)
        total = dot(left_tile, right_tile, total)
    is_there = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(out + (batch * rows + row[:, None]) * columns + column[None, :], total, mask=is_there)


@triton.jit
def _sum(values, out, columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for first in range(0, columns, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        total += tl.sum(tl.load(values + row * columns + at, mask=at < columns, other=0.0), 0)
    tl.store(out + row, total)


def product(left_bMK: Tensor, right_bKN: Tensor, total_bMN: Tensor | None = None) -> Tensor:
    """left · right, [b, M, N] or [M, N]: fp32 for factors of fp32 or bf16. With a total the product is added to it, in
    place.
    """
    if left_bMK.dim() == 2:
        return product(left_bMK[None], right_bKN[None], None if total_bMN is None else total_bMN[None])[0]
    (b, M, K), N = left_bMK.shape, right_bKN.shape[2]
    out_bMN = left_bMK.new_empty(b, M, N, dtype=torch.float32)
    if out_bMN.numel():
        _product[triton.cdiv(M, SIDE), triton.cdiv(N, SIDE), b](
            left_bMK,
            right_bKN,
            out_bMN,
            M,
            N,
            K,
            left_bMK.stride(),
            right_bKN.stride(),
            SIDE=SIDE,
            DEPTH=DEPTH,
        )
    return out_bMN if total_bMN is None else total_bMN.add_(out_bMN)


def row_sum(values_RC: Tensor) -> Tensor:
    """The sum over the last dim, kept as 1, of fp32 values of any shape."""
    values_RC = values_RC.contiguous()
    out = values_RC.new_empty(*values_RC.shape[:-1], 1)
    if out.numel():
        _sum[out.numel(),](values_RC, out, values_RC.shape[-1], COLUMNS=COLUMNS)
    return out


def row_norm(values_RC: Tensor) -> Tensor:
    """The L2 norm over the last dim, kept as 1, of fp32 values of any shape."""
    return row_sum(values_RC * values_RC).sqrt_()

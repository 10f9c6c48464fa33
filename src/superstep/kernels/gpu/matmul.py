"""A product of matrices: the example for tiles, ``docs/howto/write-a-gpu-kernel.md``.

M, N, K  rows, columns, and what is summed over
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from superstep.kernels.gpu.language import dot

SIDE = 64
"""Of a tile, rows and columns."""


@triton.jit
def _matmul(
    left,
    right,
    out,
    rows,
    columns,
    inner,
    left_strides,
    right_strides,
    SIDE: tl.constexpr,
):
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for first in range(0, inner, SIDE):
        at = first + tl.arange(0, SIDE)
        left_places = left + row[:, None] * left_strides[0] + at[None, :] * left_strides[1]
        right_places = right + at[:, None] * right_strides[0] + column[None, :] * right_strides[1]
        left_tile = tl.load(left_places, mask=(row[:, None] < rows) & (at[None, :] < inner), other=0.0)
        right_tile = tl.load(right_places, mask=(at[:, None] < inner) & (column[None, :] < columns), other=0.0)
        total = dot(left_tile, right_tile, total)
    is_there = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(out + row[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=is_there)


def matmul(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """left · right, [M, N]: summed in fp32, rounded once to the dtype of the factors."""
    (M, K), N = left_MK.shape, right_KN.shape[1]
    out_MN = torch.empty(M, N, dtype=left_MK.dtype, device=left_MK.device)
    _matmul[triton.cdiv(M, SIDE), triton.cdiv(N, SIDE)](
        left_MK, right_KN, out_MN, M, N, K, left_MK.stride(), right_KN.stride(), SIDE=SIDE
    )
    return out_MN

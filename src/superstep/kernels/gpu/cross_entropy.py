"""Rows of logits to log-sum-exp and the target's logit, and to gradients in place: see ``kernels.cross_entropy``.

C  rows    V  columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from superstep.kernels.gpu.language import pad_tile

BLOCK = 4096
"""Logits that a program has in registers at once."""


@triton.jit
def _sums(logits, targets, lse, score, columns, width, temperature, BLOCK: tl.constexpr):
    """A row's sums, rescaled whenever a larger logit comes."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    peak, norm = float("-inf"), 0.0
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(peak, tl.max(x, 0))
        norm = norm * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < columns)
    own = tl.load(logits + tl.where(is_here, target, 0), mask=is_here, other=0.0).to(tl.float32)
    tl.store(lse + row, peak + tl.log(norm))
    tl.store(score + row, own / temperature)


@triton.jit
def _gradients(logits, targets, lse, factor, columns, width, temperature, BLOCK: tl.constexpr):
    """The gradients of some columns of a row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row * width + column
    slope = tl.load(factor + row) / temperature
    is_here = column < columns
    x = tl.load(logits, mask=is_here, other=0.0).to(tl.float32) / temperature
    gradient = (tl.exp(x - tl.load(lse + row)) - tl.where(column == tl.load(targets + row), 1.0, 0.0)) * slope
    tl.store(logits, tl.where(is_here, gradient, 0.0).to(logits.dtype.element_ty), mask=column < width)


def row_sums(logits_CV: Tensor, targets_C: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor]:
    """As ``kernels.cross_entropy.row_sums``; both tensors are contiguous."""
    C, V = logits_CV.shape
    lse_C, score_C = (logits_CV.new_empty(C, dtype=torch.float32) for _ in range(2))
    _sums[C,](logits_CV, targets_C, lse_C, score_C, columns, V, temperature, BLOCK=_block(columns), num_warps=8)
    return lse_C, score_C


def row_gradients_(
    logits_CV: Tensor, targets_C: Tensor, columns: int, lse_C: Tensor, factor_C: Tensor, temperature: float
) -> None:
    """As ``kernels.cross_entropy.row_gradients_``; all tensors are contiguous."""
    (C, V), block = logits_CV.shape, _block(logits_CV.shape[1])
    _gradients[C, triton.cdiv(V, block)](
        logits_CV, targets_C, lse_C, factor_C, columns, V, temperature, BLOCK=block, num_warps=8
    )


def _block(columns: int) -> int:
    return min(BLOCK, pad_tile(columns))

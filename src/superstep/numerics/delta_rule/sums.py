"""The products and sums of linear attention: torch's, or those of exact mode, in which bits depend on one row alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.kernels import invariant

WIDTH = 16
"""In exact mode the width of heads is padded to a multiple of this (``numerics.invariant_matmul``)."""

BASE = 16
"""The largest triangular matrix that is inverted by substitution."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Products of matrices side by side, and sums over the last dim."""

    is_exact: bool = False

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """left · right, over the last two dims."""
        if not self.is_exact:
            return left @ right
        out: Tensor = invariant.product(left.flatten(0, -3), right.flatten(0, -3)).unflatten(0, left.shape[:-2])
        return out

    def add_last(self, x: Tensor) -> Tensor:
        """The sum over the last dim."""
        return invariant.row_sum(x.contiguous()).squeeze(-1) if self.is_exact else x.sum(-1)

    def pad(self, x: Tensor) -> Tensor:
        """Heads with as many numbers as products need; the added ones are zeros."""
        return F.pad(x, (0, -x.shape[-1] % WIDTH)) if self.is_exact else x

    def invert(self, lower: Tensor) -> Tensor:
        """The inverse of 1 + L, for strictly lower triangular matrices L, [..., C, C] with C = 16 · 2ⁿ.

        Blocks of 16 by substitution; from two of them the inverse of the block of twice the size:
        [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]].
        """
        size, whole = BASE, lower.shape[-1]
        inverse = torch.zeros_like(lower)
        for at in range(0, whole, size):
            block = slice(at, at + size)
            inverse[..., block, block] = _substitute(lower[..., block, block])
        while size < whole:
            for at in range(0, whole, 2 * size):
                first, second = slice(at, at + size), slice(at + size, at + 2 * size)
                below = self.multiply(lower[..., second, first], inverse[..., first, first])
                inverse[..., second, first] = self.multiply(inverse[..., second, second], below).neg_()
            size *= 2
        return inverse


def _substitute(lower: Tensor) -> Tensor:
    inverse = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower).clone()
    for row in range(lower.shape[-1] - 1):
        # Row by row, so that each element is summed in one order.
        inverse[..., row + 1 :, :] -= lower[..., row + 1 :, row, None] * inverse[..., row, None, :]
    return inverse

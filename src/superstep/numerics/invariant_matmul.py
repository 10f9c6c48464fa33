"""Products with bits that do not depend on how the factors are cut.

A product of matrices sums over its inner dim K, and a library's order of that sum depends on K. Measured on CPUs with
AVX-512 (MKL in fp32, oneDNN in bf16, one thread): at K up to 384 an element's bits depend only on its row and column,
for any number of rows (from 16 on) and columns; from 448 on they do not. An Intel Xeon keeps this for 2 columns or
more; on an AMD EPYC (Zen 5), where MKL uses other kernels, the columns after the last multiple of 16 are summed in
another order. So fewer rows or odd columns are padded, and K is cut into pieces of at most ``PIECE``, whose products
are summed here in a fixed order:

    cells     K is cut into as many equal cells as any layout could cut it into; a tensor-parallel rank holds some of
              them. Cells are summed as a binary tree, so that ranks can first sum what they have.
    pieces    a cell larger than PIECE is cut further, and its pieces are summed from left to right.

Partial sums are fp32 for any dtype of the factors. ``kernels.invariant`` computes the pieces, on a GPU by a kernel of
our own. ``numerics.exact_self_check`` checks this on a machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from superstep.kernels import invariant

PIECE = 256
"""The largest inner dim of one product."""

ROWS = 16
"""The fewest rows of one product; fewer are padded."""

COLUMNS = 16
"""Columns are padded to a multiple of this."""

SMALL = 16**3
"""Multiply-adds up to which torch multiplies bf16 with a kernel of its own, in another order; padded too."""


def product(left_MK: Tensor, right_KN: Tensor, *, cells: int = 1) -> Tensor:
    """``left · right`` in fp32: a tree over ``cells`` equal parts of K."""
    width = left_MK.shape[1] // cells
    sums = [_cell(left_MK[:, at : at + width], right_KN[at : at + width]) for at in range(0, left_MK.shape[1], width)]
    return tree_sum(sums)


def _cell(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    rows, inner = left_MK.shape
    columns = right_KN.shape[1]
    if columns % COLUMNS:
        right_KN = _pad(right_KN, columns=-columns % COLUMNS)
    smallest = inner % PIECE or min(inner, PIECE)
    least = max(ROWS, SMALL // (smallest * right_KN.shape[1]) + 1)
    if rows < least:
        left_MK = _pad(left_MK, rows=least - rows)
    total: Tensor | None = None
    for at in range(0, left_MK.shape[1], PIECE):
        total = invariant.product(left_MK[:, at : at + PIECE], right_KN[at : at + PIECE], total)
    assert total is not None
    return total[:rows, :columns]


def _pad(matrix: Tensor, *, rows: int = 0, columns: int = 0) -> Tensor:
    """Add rows and columns of zeros, with the same memory layout: the layout selects the kernel."""
    if matrix.stride(0) == 1 and matrix.shape[1] > 1:
        return _pad(matrix.t(), rows=columns, columns=rows).t()
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows))


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum as a binary tree over neighbours; the number of parts is a power of two (else AssertionError)."""
    assert len(parts) & (len(parts) - 1) == 0, "a tree of ranks and cells needs powers of two"
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]

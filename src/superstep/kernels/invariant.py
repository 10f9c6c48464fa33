"""One product, and sums of rows, for exact mode: an element's bits depend only on its own row and column.

On a CPU torch keeps this within bounds that ``numerics.invariant_matmul`` gives. On a GPU cuBLAS and torch's reductions
choose their order by the shape, and ``kernels.gpu.invariant`` takes their place. All results are fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from superstep.kernels import triton_loader


def product(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """left · right: matrices of fp32 or bf16, or as many side by side. With a total it is added to that, in place."""
    if left.is_cuda:
        out: Tensor = triton_loader.module("invariant").product(left, right, total)
        return out
    return torch_product(left, right, total)


def row_sum(values: Tensor) -> Tensor:
    """The sum over the last dim, which stays as 1, of fp32 values."""
    if values.is_cuda:
        out: Tensor = triton_loader.module("invariant").row_sum(values)
        return out
    return torch_row_sum(values)


def row_norm(values: Tensor) -> Tensor:
    """The L2 norm over the last dim, which stays as 1, of fp32 values."""
    if values.is_cuda:
        out: Tensor = triton_loader.module("invariant").row_norm(values)
        return out
    return torch_row_norm(values)


def torch_product(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """``product`` by torch."""
    if total is None:
        return torch.matmul(left, right).float()
    if left.dtype != torch.float32:
        return total.add_(torch.matmul(left, right))
    return total.addmm_(left, right) if left.dim() == 2 else total.baddbmm_(left, right)


def torch_row_sum(values: Tensor) -> Tensor:
    """``row_sum`` by torch."""
    return values.sum(-1, keepdim=True)


def torch_row_norm(values: Tensor) -> Tensor:
    """``row_norm`` by torch."""
    norm: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return norm

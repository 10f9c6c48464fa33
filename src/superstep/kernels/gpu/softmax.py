"""Softmax over rows: the example for one program a row, ``docs/howto/write-a-gpu-kernel.md``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from superstep.kernels.gpu.language import padded


@triton.jit
def _softmax(x, out, columns, row_stride, WIDE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    is_there = column < columns
    x_V = tl.load(x + row * row_stride + column, mask=is_there, other=float("-inf")).to(tl.float32)
    weight = tl.exp(x_V - tl.max(x_V, 0))
    tl.store(out + row * columns + column, (weight / tl.sum(weight, 0)).to(out.dtype.element_ty), mask=is_there)


def softmax(x_TV: Tensor) -> Tensor:
    """Of each row: [T, V], computed in fp32. A row is read once and written once."""
    T, V = x_TV.shape
    x_TV = x_TV if x_TV.stride(1) == 1 else x_TV.contiguous()
    out_TV = torch.empty(T, V, dtype=x_TV.dtype, device=x_TV.device)
    _softmax[T,](x_TV, out_TV, V, x_TV.stride(0), WIDE=padded(V))
    return out_TV

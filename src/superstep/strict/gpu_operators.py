"""Operators that only GPUs have, but for attention: the CPU's arithmetic behind what CUDA's kernels take and refuse.

The rules are those of torch's checks: ``aten/src/ATen/native/cuda/Blas.cpp`` for products of 16 bits in fp32; those of
grouped products are in ``gpu_grouped``.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from superstep.strict import gpu_attention, gpu_grouped
from superstep.strict.gpu_attention import HALVES, require


def rms_norm_back(
    grad: Tensor, x: Tensor, shape: list[int], scale: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """``_fused_rms_norm_backward``: sums are fp32."""
    dims = tuple(range(-len(shape), 0))
    normed, back = x.float() * scale, grad.float() if weight is None else grad.float() * weight.float()
    dx = scale * (back - normed * (back * normed).mean(dims, keepdim=True))
    of_weight = (grad.float() * normed).flatten(0, -len(shape) - 1).sum(0) if weight is not None else None
    dw = of_weight.to(weight.dtype) if of_weight is not None and weight is not None and wanted[1] else None
    return dx.to(x.dtype) if wanted[0] else None, dw


def require_wide_mm(left: Tensor, right: Tensor, out: Tensor) -> None:
    """What a product takes whose result is of another dtype than its factors (``_mm_dtype_out_cuda``)."""
    require(left.dtype == right.dtype, f"input dtypes must be the same, not {left.dtype} and {right.dtype}")
    is_wider = out.dtype == torch.float32 and left.dtype in HALVES
    why = f"out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs, not {out.dtype} for {left.dtype}"
    require(out.dtype == left.dtype or is_wider, why)


def require_wide_addmm(total: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """The same of one that is added to something (``_addmm_dtype_out_cuda``)."""
    require_wide_mm(left, right, out)
    why = f"self dtype must match either out_dtype or mat1 dtype, and is {total.dtype}"
    require(total.dtype in (out.dtype, left.dtype), why)


def addmm_into(total, left, right, out_dtype, *, beta=1, alpha=1, out):  # noqa: ANN001, ANN201
    """``addmm`` whose result is wider than its factors, which cuBLAS alone has."""
    require(out.dtype == out_dtype, f"out_dtype {out_dtype} must be that of the out tensor, which is {out.dtype}")
    return out.copy_(beta * total.to(out_dtype) + alpha * (left.to(out_dtype) @ right.to(out_dtype)))


def mm_into(left, right, out_dtype, *, out):  # noqa: ANN001, ANN201
    """``mm`` whose result is wider than its factors."""
    require(out.dtype == out_dtype, f"out_dtype {out_dtype} must be that of the out tensor, which is {out.dtype}")
    return out.copy_(left.to(out_dtype) @ right.to(out_dtype))


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """``native_dropout``, whose mask is of the device's random numbers: it is given no generator."""
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


OF_CPU = gpu_attention.OF_CPU | {
    "_fused_rms_norm_backward": rms_norm_back,
    "addmm.dtype_out": addmm_into,
    "mm.dtype_out": mm_into,
}
"""What tasks call, on the kernels' views, which are the CPU's."""

RULES = gpu_attention.RULES | {
    "addmm.dtype_out": lambda total, left, right, dtype, beta, alpha, out: require_wide_addmm(total, left, right, out),
    "mm.dtype_out": lambda left, right, dtype, out: require_wide_mm(left, right, out),
}
"""What is refused at the call, as a GPU's kernels do it."""

LIBRARY = torch.library.Library("aten", "IMPL")


def install(device: ModuleType) -> None:
    """Register them.

    Args:
        device: the compiled module.
    """
    for name, rule in RULES.items():
        device.add_rule(name, rule)
    for name, function in OF_CPU.items():
        LIBRARY.impl(name, function, "CPU")
    LIBRARY.impl("native_dropout", native_dropout, "CUDA")
    LIBRARY.impl("_grouped_mm", gpu_grouped.on(device), "CUDA")

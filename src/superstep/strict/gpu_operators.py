"""Operators that only GPUs have, without attention: the CPU's arithmetic with the checks of CUDA's kernels.

The rules are those of torch's checks: ``aten/src/ATen/native/cuda/Blas.cpp`` for products of 16 bits in fp32; those of
grouped products are in ``gpu_grouped``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from superstep.strict import gpu_attention, gpu_grouped, gpu_recurrent
from superstep.strict.gpu_attention import HALVES, require

aten = torch.ops.aten


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
    """Check a product with another dtype than its factors (``_mm_dtype_out_cuda``)."""
    is_whole = left.shape[-1] == right.shape[-2] and out.shape == (*left.shape[:-1], right.shape[-1])
    require(is_whole, f"shapes {tuple(left.shape)}, {tuple(right.shape)} cannot be multiplied to {tuple(out.shape)}")
    require(left.dtype == right.dtype, f"input dtypes must be the same, not {left.dtype} and {right.dtype}")
    is_wider = out.dtype == torch.float32 and left.dtype in HALVES
    why = f"out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs, not {out.dtype} for {left.dtype}"
    require(out.dtype == left.dtype or is_wider, why)


def require_wide_addmm(total: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """The same for a product with a sum (``_addmm_dtype_out_cuda``)."""
    require_wide_mm(left, right, out)
    why = f"self dtype must match either out_dtype or mat1 dtype, and is {total.dtype}"
    require(total.dtype in (out.dtype, left.dtype), why)


def add_into(total, left, right, out_dtype, *, beta=1, alpha=1, out):  # noqa: ANN001, ANN201
    """``addmm`` and ``baddbmm`` with a wider result than their factors, as cuBLAS alone supports."""
    require(out.dtype == out_dtype, f"out_dtype {out_dtype} must be that of the out tensor, which is {out.dtype}")
    return out.copy_(beta * total.to(out_dtype) + alpha * (left.to(out_dtype) @ right.to(out_dtype)))


def product_into(left, right, out_dtype, *, out):  # noqa: ANN001, ANN201
    """``mm`` and ``bmm`` with a wider result than their factors."""
    require(out.dtype == out_dtype, f"out_dtype {out_dtype} must be that of the out tensor, which is {out.dtype}")
    return out.copy_(left.to(out_dtype) @ right.to(out_dtype))


def fresh(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """An empty tensor for a product."""
    return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=out_dtype)


def making(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product that allocates its result."""
    return lambda left, right, out_dtype: product(left, right, out_dtype, out=fresh(left, right, out_dtype))


def making_sum(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product and sum that allocate their result."""
    return lambda total, left, right, out_dtype, **factors: product(
        total, left, right, out_dtype, **factors, out=fresh(left, right, out_dtype)
    )


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """``native_dropout``, with a mask from the device's random numbers: it gets no generator."""
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


OF_CPU = gpu_attention.OF_CPU | {
    "_fused_rms_norm_backward": rms_norm_back,
    "addmm.dtype_out": add_into,
    "baddbmm.dtype_out": add_into,
    "mm.dtype_out": product_into,
    "bmm.dtype_out": product_into,
}
"""Functions of tasks, on the kernels' CPU views."""

OF_GPU = gpu_recurrent.OF_GPU | {
    "native_dropout": native_dropout,
    "mm.dtype": making(aten.mm.dtype_out),
    "bmm.dtype": making(aten.bmm.dtype_out),
    "addmm.dtype": making_sum(aten.addmm.dtype_out),
    "baddbmm.dtype": making_sum(aten.baddbmm.dtype_out),
}
"""Operators composed of other operators of the device."""

OTHER_LOSSES = ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
"""Whether a library's kernel computes it; torch 2.11 does not have the second."""

RULES = gpu_attention.RULES | {
    "addmm.dtype_out": lambda total, left, right, dtype, beta, alpha, out: require_wide_addmm(total, left, right, out),
    "baddbmm.dtype_out": lambda total, left, right, dtype, beta, alpha, out: require_wide_addmm(
        total, left, right, out
    ),
    "mm.dtype_out": lambda left, right, dtype, out: require_wide_mm(left, right, out),
    "bmm.dtype_out": lambda left, right, dtype, out: require_wide_mm(left, right, out),
}
"""Checks at the call, as in a GPU's kernels."""

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
    for name, function in OF_GPU.items():
        LIBRARY.impl(name, function, "CUDA")
    for name in OTHER_LOSSES:
        for overload in getattr(aten, name).overloads() if hasattr(aten, name) else ():
            LIBRARY.impl(f"{name}.{overload}".removesuffix(".default"), lambda *_: False, "CUDA")
    LIBRARY.impl("_grouped_mm", gpu_grouped.on(device), "CUDA")

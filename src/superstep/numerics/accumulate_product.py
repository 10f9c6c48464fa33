"""add_product: adds a product to an fp32 sum with as little rounding as the device's kernels allow."""

from __future__ import annotations

import torch
from torch import Tensor

from superstep.kernels import amx_weight_grad
from superstep.kernels.product import add_by_fp32, by_fp32, by_onednn, product


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """total += scale · left · right; the factors may be narrower than ``total``, which is then fp32.

    On a GPU the product of 16-bit factors is summed in fp32 straight into ``total``; so it is on a CPU that multiplies
    faster in fp32, or has AMX, where ``kernels.amx_weight_grad`` is used. Elsewhere torch 2.13 has no such kernel: each
    product is summed in fp32 and rounded to the factors' dtype, by at most 2^-9 of its size in bf16, and ``total`` adds
    these in fp32.
    """
    if amx_weight_grad.takes(total, left, right):
        amx_weight_grad.add(total, left, right, scale)
        return
    if by_fp32(left, right):
        add_by_fp32(total, left, right, scale)
    elif left.dtype == total.dtype and not by_onednn(left, right):
        total.addmm_(left, right, alpha=scale)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        total.add_(product(left, right), alpha=scale)

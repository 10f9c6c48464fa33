"""Operators that only GPUs have: the CPU's arithmetic behind what CUDA's kernels take and refuse.

The rules are those of torch's checks: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` for attention,
``aten/src/ATen/native/GroupedMMUtils.h`` for grouped products.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def widen_heads(kv_BHSN: Tensor, query_BHSN: Tensor) -> Tensor:
    """Keys or values repeated for the heads of the queries that share them."""
    groups = query_BHSN.shape[1] // kv_BHSN.shape[1]
    return kv_BHSN if groups == 1 else kv_BHSN.repeat_interleave(groups, 1)


def narrow_heads(grad_BHSN: Tensor, heads: int) -> Tensor:
    """The gradient of keys or values that several heads share: the sum over these."""
    return grad_BHSN if grad_BHSN.shape[1] == heads else grad_BHSN.unflatten(1, (heads, -1)).sum(2)


def require_flash(*tensors: Tensor) -> None:
    """What flash attention takes: 16-bit numbers, heads of at most 256 that are multiples of 8, a last stride of 1."""
    for tensor in tensors:
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type (strict device): {tensor.dtype}")
        if tensor.shape[-1] % 8 or tensor.shape[-1] > 256:
            raise RuntimeError(f"FlashAttention takes heads of a multiple of 8 up to 256, not {tensor.shape[-1]}")
        if tensor.stride(-1) != 1:
            raise RuntimeError("FlashAttention needs a last dim of stride 1 (strict device)")


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, is_causal: bool, scale: float | None):  # noqa: ANN201
    """The CPU's attention in fp32: its output and the logarithms of its sums [B, H, S]."""
    mask = None if bias is None else bias.float()
    wide = (q.float(), widen_heads(k, q).float(), widen_heads(v, q).float())
    return aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, is_causal, attn_mask=mask, scale=scale)


def attend_back(grad, q, k, v, bias, out, lse, *, is_causal, scale):  # noqa: ANN001, ANN201, PLR0913 - as the operator
    """The gradients of queries, keys and values, in their dtypes."""
    mask = None if bias is None else bias.float()
    wide = (grad.float(), q.float(), widen_heads(k, q).float(), widen_heads(v, q).float(), out.float())
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = back(*wide, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
    return dq.to(q.dtype), narrow_heads(dk, k.shape[1]).to(k.dtype), narrow_heads(dv, v.shape[1]).to(v.dtype)


def flash(q, k, v, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # noqa: ANN001, ANN201
    """``_scaled_dot_product_flash_attention``."""
    out, lse = attend(q, k, v, None, is_causal=is_causal, scale=scale)
    none, seed = torch.empty(0), torch.zeros((), dtype=torch.int64)
    return out.to(q.dtype), lse, none, none, q.shape[2], k.shape[2], seed, seed, none


def flash_back(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, is_causal, seed, offset, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_scaled_dot_product_flash_attention_backward``."""
    return attend_back(grad, q, k, v, None, out, lse, is_causal=is_causal, scale=scale)


def parts(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Of each sequence of many that lie one after the other, its queries and its keys."""
    for of_q, of_k in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        yield slice(*of_q), slice(*of_k)


def apart(x_TNH: Tensor, part: slice) -> Tensor:
    """One of these sequences, [1, N, S, H]."""
    return x_TNH[part].transpose(0, 1)[None]


def flash_parts(q, k, v, starts_q, starts_k, max_q, max_k, dropout, is_causal, debug, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_flash_attention_forward`` of many sequences."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for of_q, of_k in parts(starts_q, starts_k):
        given = apart(q, of_q), apart(k, of_k), apart(v, of_k)
        mixed, lse[None, :, of_q] = attend(*given, None, is_causal=is_causal, scale=scale)
        apart(out, of_q).copy_(mixed)
    seed = torch.zeros((), dtype=torch.uint64)
    return out, lse, seed.expand(2), seed, torch.empty(0, dtype=q.dtype)


def flash_parts_back(  # noqa: ANN201, PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    *more: Any,  # noqa: ANN401
    scale: float | None = None,
):
    """``_flash_attention_backward`` of many sequences."""
    _, _, _, is_causal, *_ = more
    found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for of_q, of_k in parts(starts_q, starts_k):
        given = apart(grad, of_q), apart(q, of_q), apart(k, of_k), apart(v, of_k), None, apart(out, of_q)
        back = attend_back(*given, lse[None, :, of_q].contiguous(), is_causal=is_causal, scale=scale)
        for whole, part, of in zip(found, back, (of_q, of_k, of_k), strict=True):
            apart(whole, of).copy_(part)
    return found


def efficient(q, k, v, bias, compute_log_sumexp, dropout=0.0, is_causal=False, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_scaled_dot_product_efficient_attention``; its sums, where they are wanted, are padded to a multiple of 32
    queries.
    """
    out, lse = attend(q, k, v, bias, is_causal=is_causal, scale=scale)
    lse = lse if compute_log_sumexp else lse[..., :0]
    seed = torch.zeros((), dtype=torch.int64)
    return out.to(q.dtype), torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf), seed, seed


def efficient_back(grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, is_causal=False, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_scaled_dot_product_efficient_attention_backward``; a mask has no gradient."""
    sums = lse[..., : q.shape[2]].contiguous()
    return (*attend_back(grad, q, k, v, bias, out, sums, is_causal=is_causal, scale=scale), None)


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


def addmm_into(total, left, right, out_dtype, *, beta=1, alpha=1, out):  # noqa: ANN001, ANN201
    """``addmm`` whose result is wider than its factors, which cuBLAS alone has."""
    return out.copy_(beta * total.to(out_dtype) + alpha * (left.to(out_dtype) @ right.to(out_dtype)))


def mm_into(left, right, out_dtype, *, out):  # noqa: ANN001, ANN201
    """``mm`` whose result is wider than its factors."""
    return out.copy_(left.to(out_dtype) @ right.to(out_dtype))


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """``native_dropout``, whose mask is of the device's random numbers: it is given no generator."""
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


OF_CPU = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_back,
    "_flash_attention_forward": flash_parts,
    "_flash_attention_backward": flash_parts_back,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_back,
    "_fused_rms_norm_backward": rms_norm_back,
    "addmm.dtype_out": addmm_into,
    "mm.dtype_out": mm_into,
}
"""What tasks call, on the kernels' views, which are the CPU's."""

RULES = {
    "_scaled_dot_product_flash_attention": lambda q, k, v, *_: require_flash(q, k, v),
    "_scaled_dot_product_flash_attention_backward": lambda grad, q, k, v, *_: require_flash(grad, q, k, v),
    "_flash_attention_forward": lambda q, k, v, *_: require_flash(q, k, v),
    "_flash_attention_backward": lambda grad, q, k, v, *_: require_flash(grad, q, k, v),
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

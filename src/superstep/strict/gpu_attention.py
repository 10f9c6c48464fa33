"""Attention by the kernels that only GPUs have: the CPU's arithmetic behind what CUDA's take and refuse.

The rules of flash attention are those of torch's ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``,
those of the efficient one of ``attention.cu``, ``attention_backward.cu`` and
``mem_eff_attention/kernel_{forward,backward}.h`` beside it. Which one is chosen is in ``device/attention.h``.

    B  sequences    H  heads    S, T  queries, keys    N  width of a head
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

HALVES = (torch.float16, torch.bfloat16)
ALIGNED_BYTES = 16
WIDEST_FLASH = 256
SUMS_QUERIES = 32
"""The efficient kernel's sums are of a multiple of so many queries, which its backward pass reads (kAlignLSE)."""


def require(rule: bool, why: str) -> None:
    """Raise what a kernel refuses at its call."""
    if not rule:
        raise RuntimeError(f"{why} (strict device)")


def require_flash(*tensors: Tensor) -> None:
    """What flash attention takes: one 16-bit dtype, heads of up to 256 that are multiples of 8, a last stride of 1."""
    for tensor in tensors:
        require(tensor.dtype in HALVES, f"FlashAttention only support fp16 and bf16 data type, not {tensor.dtype}")
        require(tensor.dtype == tensors[0].dtype, "query, key and value must have the same dtype")
        width = tensor.shape[-1]
        require(width % 8 == 0, f"head_size should be a multiple of 8, not {width}")
        require(
            width <= WIDEST_FLASH, f"FlashAttention only supports head dimension at most {WIDEST_FLASH}, not {width}"
        )
        require(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")


def require_shared_heads(query_heads: int, heads: int) -> None:
    """Each key head is for as many query heads."""
    require(query_heads % heads == 0, f"{heads} heads of keys and values must divide {query_heads} of queries")


def require_flash_of_one(q: Tensor, k: Tensor, v: Tensor, *grads: Tensor) -> None:
    """Of tensors of sequences [B, H, S, N]."""
    require_flash(q, k, v, *grads)
    require_shared_heads(q.shape[1], k.shape[1])


def require_flash_of_many(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *grads: Tensor) -> None:
    """Of sequences that lie one after the other [T, H, N], which begin where int32 numbers say."""
    require_flash(q, k, v, *grads)
    require_shared_heads(q.shape[1], k.shape[1])
    for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_k", starts_k)):
        require(starts.dtype == torch.int32, f"{name} must have dtype int32, not {starts.dtype}")
        require(starts.is_contiguous(), f"{name} must be contiguous")


def require_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    """What the efficient kernel takes: a key head for each query head, in rows of whole 16 bytes."""
    require(q.shape[1] == k.shape[1] == v.shape[1], f"{k.shape[1]} heads of keys are not those of {q.shape[1]} queries")
    require(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    require(q.dtype in (*HALVES, torch.float32), f"Only fp32, half & bf16 supported at the moment, not {q.dtype}")
    aligned = ALIGNED_BYTES // q.element_size()
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        require(tensor.stride(-1) == 1, f"{name} must have a last dim of stride 1")
        width = tensor.shape[-1]
        require(width % aligned == 0, f"cutlassF: no kernel found to launch! Heads of {width} are not whole 16 bytes")
        require_aligned(name, tensor, aligned)
    if bias is not None:
        require(bias.dtype == q.dtype, f"invalid dtype for bias - should match query's dtype: {bias.dtype}, {q.dtype}")
        require(bias.stride(-1) == 1, "attn_bias must have a last dim of stride 1")
        require_aligned("attn_bias", bias, aligned)


def require_aligned(name: str, tensor: Tensor, aligned: int) -> None:
    """All strides but the last are multiples of so many numbers, where there is more than one step of them."""
    steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    are_aligned = all(size <= 1 or stride % aligned == 0 for size, stride in steps)
    require(are_aligned, f"{name} is not correctly aligned: strides {tuple(tensor.stride())}")


def require_efficient_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lse: Tensor) -> None:
    """The same, and sums of as many queries as the backward pass reads at once."""
    require_efficient(q, k, v, bias)
    require(grad.dtype == q.dtype, f"the output's gradient is of {grad.dtype}, and queries of {q.dtype}")
    is_whole = lse.dtype == torch.float32 and lse.shape[2] % SUMS_QUERIES == 0
    require(is_whole, f"LSE is not correctly aligned: {lse.shape[2]} sums of {lse.dtype}")


def widen_heads(kv_BHSN: Tensor, query_BHSN: Tensor) -> Tensor:
    """Keys or values repeated for the heads of the queries that share them."""
    groups = query_BHSN.shape[1] // kv_BHSN.shape[1]
    return kv_BHSN if groups == 1 else kv_BHSN.repeat_interleave(groups, 1)


def narrow_heads(grad_BHSN: Tensor, heads: int) -> Tensor:
    """The gradient of keys or values that several heads share: the sum over these."""
    return grad_BHSN if grad_BHSN.shape[1] == heads else grad_BHSN.unflatten(1, (heads, -1)).sum(2)


def flash_mask(q: Tensor, k: Tensor, *, is_causal: bool) -> dict[str, Any]:
    """How flash attention masks: where it is causal, the last query sees the last key, whatever their numbers."""
    queries, keys = q.shape[2], k.shape[2]
    if not is_causal or queries == keys:
        return {"bias": None, "is_causal": is_causal}
    is_seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return {"bias": torch.zeros(1, 1, queries, keys).masked_fill_(~is_seen, -torch.inf), "is_causal": False}


def attend(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, is_causal: bool, scale: float | None):  # noqa: ANN201
    """The CPU's attention in fp32: its output and the logarithms of its sums [B, H, S]."""
    mask = None if bias is None else bias.float()
    wide = (q.float(), widen_heads(k, q).float(), widen_heads(v, q).float())
    return aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, is_causal, attn_mask=mask, scale=scale)


def attend_back(grad, q, k, v, out, lse, *, bias, is_causal, scale):  # noqa: ANN001, ANN201, PLR0913 - as the operator
    """The gradients of queries, keys and values, in their dtypes."""
    mask = None if bias is None else bias.float()
    wide = (grad.float(), q.float(), widen_heads(k, q).float(), widen_heads(v, q).float(), out.float())
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = back(*wide, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
    return dq.to(q.dtype), narrow_heads(dk, k.shape[1]).to(k.dtype), narrow_heads(dv, v.shape[1]).to(v.dtype)


def flash(q, k, v, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # noqa: ANN001, ANN201
    """``_scaled_dot_product_flash_attention``."""
    out, lse = attend(q, k, v, **flash_mask(q, k, is_causal=is_causal), scale=scale)
    none, seed = torch.empty(0), torch.zeros((), dtype=torch.int64)
    return out.to(q.dtype), lse, none, none, q.shape[2], k.shape[2], seed, seed, none


def flash_back(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, is_causal, seed, offset, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_scaled_dot_product_flash_attention_backward``."""
    return attend_back(grad, q, k, v, out, lse, **flash_mask(q, k, is_causal=is_causal), scale=scale)


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
        mask = flash_mask(*given[:2], is_causal=is_causal)
        mixed, lse[None, :, of_q] = attend(*given, **mask, scale=scale)
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
        given = apart(grad, of_q), apart(q, of_q), apart(k, of_k), apart(v, of_k), apart(out, of_q)
        mask = flash_mask(*given[1:3], is_causal=is_causal)
        back = attend_back(*given, lse[None, :, of_q].contiguous(), **mask, scale=scale)
        for whole, part, of in zip(found, back, (of_q, of_k, of_k), strict=True):
            apart(whole, of).copy_(part)
    return found


def efficient(q, k, v, bias, compute_log_sumexp, dropout=0.0, is_causal=False, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_scaled_dot_product_efficient_attention``; its sums, where they are wanted, are of whole ``SUMS_QUERIES``."""
    out, lse = attend(q, k, v, bias=bias, is_causal=is_causal, scale=scale)
    lse = lse if compute_log_sumexp else lse[..., :0]
    seed = torch.zeros((), dtype=torch.int64)
    return out.to(q.dtype), torch.nn.functional.pad(lse, (0, -lse.shape[2] % SUMS_QUERIES), value=torch.inf), seed, seed


def efficient_back(grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, is_causal=False, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_scaled_dot_product_efficient_attention_backward``; a mask has no gradient."""
    sums = lse[..., : q.shape[2]].contiguous()
    return (*attend_back(grad, q, k, v, out, sums, bias=bias, is_causal=is_causal, scale=scale), None)


OF_CPU = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_back,
    "_flash_attention_forward": flash_parts,
    "_flash_attention_backward": flash_parts_back,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_back,
}
"""What tasks call, on the kernels' views, which are the CPU's."""

RULES = {
    "_scaled_dot_product_flash_attention": lambda q, k, v, *_: require_flash_of_one(q, k, v),
    "_scaled_dot_product_flash_attention_backward": lambda grad, q, k, v, *_: require_flash_of_one(q, k, v, grad),
    "_flash_attention_forward": lambda q, k, v, starts_q, starts_k, *_: require_flash_of_many(
        q, k, v, starts_q, starts_k
    ),
    "_flash_attention_backward": lambda grad, q, k, v, out, lse, starts_q, starts_k, *_: require_flash_of_many(
        q, k, v, starts_q, starts_k, grad
    ),
    "_scaled_dot_product_efficient_attention": lambda q, k, v, bias, *_: require_efficient(q, k, v, bias),
    "_scaled_dot_product_efficient_attention_backward": lambda grad, q, k, v, bias, out, lse, *_: (
        require_efficient_back(grad, q, k, v, bias, lse)
    ),
}
"""What is refused at the call, as a GPU's kernels do it."""

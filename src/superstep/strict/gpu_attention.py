"""Attention by kernels that only GPUs have: the CPU's arithmetic with the checks of CUDA's kernels.

The rules of flash attention are those of torch's ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``,
those of the efficient one of ``attention.cu``, ``attention_backward.cu`` and
``mem_eff_attention/kernel_{forward,backward}.h`` beside it. ``device/attention.h`` chooses between them.

    B  sequences    H  heads    S, T  queries, keys    N  width of a head
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from superstep.strict.build import MODULE

aten = torch.ops.aten

HALVES = (torch.float16, torch.bfloat16)
ALIGNED_BYTES = 16
WIDEST_FLASH = 256
SUMS_QUERIES = 32
"""The efficient kernel pads its sums to a multiple of this, which its backward pass reads (kAlignLSE)."""


def require(rule: bool, why: str) -> None:
    """Raise a kernel's error at its call."""
    if not rule:
        raise RuntimeError(f"{why} (strict device)")


def require_flash(*tensors: Tensor) -> None:
    """Check flash attention's inputs: one 16-bit dtype, heads of up to 256 in multiples of 8, a last stride of 1."""
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
    """Check that the number of key heads divides that of query heads."""
    require(query_heads % heads == 0, f"{heads} heads of keys and values must divide {query_heads} of queries")


def require_flash_of_one(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check sequences [B, H, S, N]. Gradients are made contiguous (``_flash_attention_backward``)."""
    require_flash(q, k, v)
    require_shared_heads(q.shape[1], k.shape[1])


def require_flash_of_many(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor) -> None:
    """Check concatenated sequences [T, H, N], with starts in int32."""
    require_flash(q, k, v)
    require_shared_heads(q.shape[1], k.shape[1])
    for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_k", starts_k)):
        require(starts.dtype == torch.int32, f"{name} must have dtype int32, not {starts.dtype}")
        require(starts.is_contiguous(), f"{name} must be contiguous")


def require_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    """Check the efficient kernel's inputs: a key head for each query head, in rows of whole 16 bytes."""
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
    """Check that all strides but the last are multiples of ``aligned``, in dims of more than one element."""
    steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    are_aligned = all(size <= 1 or stride % aligned == 0 for size, stride in steps)
    require(are_aligned, f"{name} is not correctly aligned: strides {tuple(tensor.stride())}")


def require_efficient_back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lse: Tensor) -> None:
    """The same, with sums padded for the backward pass."""
    require_efficient(q, k, v, bias)
    require(grad.dtype == q.dtype, f"the output's gradient is of {grad.dtype}, and queries of {q.dtype}")
    is_whole = lse.dtype == torch.float32 and lse.shape[2] % SUMS_QUERIES == 0
    require(is_whole, f"LSE is not correctly aligned: {lse.shape[2]} sums of {lse.dtype}")


def widen_heads(kv_BHSN: Tensor, query_BHSN: Tensor) -> Tensor:
    """Keys or values repeated for the query heads that share them."""
    groups = query_BHSN.shape[1] // kv_BHSN.shape[1]
    return kv_BHSN if groups == 1 else kv_BHSN.repeat_interleave(groups, 1)


def narrow_heads(grad_BHSN: Tensor, heads: int) -> Tensor:
    """The gradient of keys or values that several heads share: the sum over these."""
    return grad_BHSN if grad_BHSN.shape[1] == heads else grad_BHSN.unflatten(1, (heads, -1)).sum(2)


def flash_mask(q: Tensor, k: Tensor, *, is_causal: bool) -> dict[str, Any]:
    """Flash attention's mask: if it is causal, the last query attends to the last key, for any lengths."""
    queries, keys = q.shape[2], k.shape[2]
    if not is_causal or queries == keys:
        return {"bias": None, "is_causal": is_causal}
    is_visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return {"bias": torch.zeros(1, 1, queries, keys).masked_fill_(~is_visible, -torch.inf), "is_causal": False}


@dataclass(frozen=True, slots=True)
class Mask:
    """Modifications of attention weights.

    Attributes:
        bias: added to the scores.
        is_causal: whether the first query attends to the first key alone.
        scale: of the scores; None means 1 / sqrt(N).
        dropout: the share of weights that become zero; the others are divided by the rest.
        seed: of dropout.
    """

    bias: Tensor | None
    is_causal: bool
    scale: float | None
    dropout: float = 0.0
    seed: int = 0

    def make_dropout(self, q: Tensor, k: Tensor) -> Tensor:
        """Dropout's factor of each weight [B, H, S, T]."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (*q.shape[:-1], k.shape[-2])
        return torch.empty(shape).bernoulli_(1 - self.dropout, generator=generator) / (1 - self.dropout)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores before the softmax [B, H, S, T]."""
        scores = q @ k.mT * self.scale_of(q)
        if self.is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return scores if self.bias is None else scores + self.bias.float()

    def scale_of(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """The CPU's attention in fp32: its output and the logarithms of its sums [B, H, S]."""
    wide = (q.float(), widen_heads(k, q).float(), widen_heads(v, q).float())
    if not mask.dropout:
        bias = None if mask.bias is None else mask.bias.float()
        cpus = aten._scaled_dot_product_flash_attention_for_cpu
        results: tuple[Tensor, Tensor] = cpus(*wide, 0.0, mask.is_causal, attn_mask=bias, scale=mask.scale)
        return results
    scores = mask.scores(*wide[:2])
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp().nan_to_num(0.0) * mask.make_dropout(*wide[:2])) @ wide[2], lse


def attend_back(grad, q, k, v, out, lse, mask):  # noqa: ANN001, ANN201 - as the operator
    """The gradients of queries, keys and values, in their dtypes."""
    wide = (grad.float(), q.float(), widen_heads(k, q).float(), widen_heads(v, q).float(), out.float())
    if mask.dropout:
        dq, dk, dv, _ = attend_whole_back(*wide, lse, mask)
    else:
        bias = None if mask.bias is None else mask.bias.float()
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = back(*wide, lse, 0.0, mask.is_causal, attn_mask=bias, scale=mask.scale)
    return dq.to(q.dtype), narrow_heads(dk, k.shape[1]).to(k.dtype), narrow_heads(dv, v.shape[1]).to(v.dtype)


def attend_whole_back(grad, q, k, v, out, lse, mask):  # noqa: ANN001, ANN201 - as the operator
    """The same in fp32 by whole scores, with their gradient, which is also that of a bias."""
    weights = (mask.scores(q, k) - lse[..., None]).exp().nan_to_num(0.0)
    kept = mask.make_dropout(q, k)
    of_scores = weights * (grad @ v.mT * kept - (grad * out).sum(-1, keepdim=True))
    scale = mask.scale_of(q)
    return of_scores @ k * scale, of_scores.mT @ q * scale, (weights * kept).mT @ grad, of_scores


def flash(q, k, v, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # noqa: ANN001, ANN201
    """``_scaled_dot_product_flash_attention``."""
    drawn = task_seed()
    out, lse = attend(q, k, v, Mask(**flash_mask(q, k, is_causal=is_causal), scale=scale, dropout=dropout, seed=drawn))
    none, seed = torch.empty(0), torch.tensor(drawn)
    return out.to(q.dtype), lse, none, none, q.shape[2], k.shape[2], seed, torch.zeros_like(seed), none


def flash_back(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, is_causal, seed, offset, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_scaled_dot_product_flash_attention_backward``."""
    mask = Mask(**flash_mask(q, k, is_causal=is_causal), scale=scale, dropout=dropout, seed=seed_in(seed))
    return attend_back(grad, q, k, v, out, lse, mask)


def task_seed() -> int:
    """The seed of the running kernel."""
    seed: int = sys.modules[MODULE].task_seed()
    return seed


def seed_in(drawn: Tensor) -> int:
    """The seed of the forward pass, which is stored once or twice."""
    return int(drawn.flatten()[0].item())


def parts(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of queries and keys of each concatenated sequence."""
    for of_q, of_k in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        yield slice(*of_q), slice(*of_k)


def apart(x_TNH: Tensor, part: slice) -> Tensor:
    """One of these sequences, [1, N, S, H]."""
    return x_TNH[part].transpose(0, 1)[None]


def flash_parts(q, k, v, starts_q, starts_k, max_q, max_k, dropout, is_causal, debug, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_flash_attention_forward`` of concatenated sequences."""
    out, lse, drawn = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0]), task_seed()
    for of_q, of_k in parts(starts_q, starts_k):
        given = apart(q, of_q), apart(k, of_k), apart(v, of_k)
        mask = flash_mask(*given[:2], is_causal=is_causal)
        seed = drawn + of_q.start
        mixed, lse[None, :, of_q] = attend(*given, Mask(**mask, scale=scale, dropout=dropout, seed=seed))
        apart(out, of_q).copy_(mixed)
    seed = torch.tensor(drawn).to(torch.uint64)
    return out, lse, seed.expand(2), torch.zeros_like(seed), torch.empty(0, dtype=q.dtype)


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
    """``_flash_attention_backward`` of concatenated sequences."""
    _, _, dropout, is_causal, drawn, *_ = more
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for of_q, of_k in parts(starts_q, starts_k):
        given = apart(grad, of_q), apart(q, of_q), apart(k, of_k), apart(v, of_k), apart(out, of_q)
        masked = flash_mask(*given[1:3], is_causal=is_causal)
        mask = Mask(**masked, scale=scale, dropout=dropout, seed=seed_in(drawn) + of_q.start if dropout else 0)
        back = attend_back(*given, lse[None, :, of_q].contiguous(), mask)
        for whole, part, of in zip(gradients, back, (of_q, of_k, of_k), strict=True):
            apart(whole, of).copy_(part)
    return gradients


def efficient(q, k, v, bias, compute_log_sumexp, dropout=0.0, is_causal=False, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_scaled_dot_product_efficient_attention``; its sums, if wanted, are padded to ``SUMS_QUERIES``."""
    drawn = task_seed()
    out, lse = attend(q, k, v, Mask(bias, is_causal, scale, dropout, drawn))
    lse = lse if compute_log_sumexp else lse[..., :0]
    padded, seed = torch.nn.functional.pad(lse, (0, -lse.shape[2] % SUMS_QUERIES), value=torch.inf), torch.tensor(drawn)
    return out.to(q.dtype), padded, seed, torch.zeros_like(seed)


def efficient_back(grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, is_causal=False, *, scale=None):  # noqa: ANN001, ANN201, PLR0913
    """``_scaled_dot_product_efficient_attention_backward``; a bias gets the sum over its broadcast dims."""
    sums, mask = lse[..., : q.shape[2]].contiguous(), Mask(bias, is_causal, scale, dropout, seed_in(seed))
    if bias is None or not wanted[3]:
        return (*attend_back(grad, q, k, v, out, sums, mask), None)
    dq, dk, dv, of_scores = attend_whole_back(grad.float(), q.float(), k.float(), v.float(), out.float(), sums, mask)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), of_scores.sum_to_size(bias.shape).to(bias.dtype)


OF_CPU = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_back,
    "_flash_attention_forward": flash_parts,
    "_flash_attention_backward": flash_parts_back,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_back,
}
"""Functions of tasks, on the kernels' CPU views."""

RULES = {
    "_scaled_dot_product_flash_attention": lambda q, k, v, *_: require_flash_of_one(q, k, v),
    "_scaled_dot_product_flash_attention_backward": lambda grad, q, k, v, *_: require_flash_of_one(q, k, v),
    "_flash_attention_forward": lambda q, k, v, starts_q, starts_k, *_: require_flash_of_many(
        q, k, v, starts_q, starts_k
    ),
    "_flash_attention_backward": lambda grad, q, k, v, out, lse, starts_q, starts_k, *_: require_flash_of_many(
        q, k, v, starts_q, starts_k
    ),
    "_scaled_dot_product_efficient_attention": lambda q, k, v, bias, *_: require_efficient(q, k, v, bias),
    "_scaled_dot_product_efficient_attention_backward": lambda grad, q, k, v, bias, out, lse, *_: (
        require_efficient_back(grad, q, k, v, bias, lse)
    ),
}
"""Checks at the call, as in a GPU's kernels."""

"""Attention by any rule in torch's operations, a block of queries at a time: windows, documents, capped scores.

It is used if no fused kernel supports the rule. The backward pass computes the scores of a block again from the
log-sum-exp (lse), so that memory does not grow with the square of the sequence. It is a custom operator of torch, as
``engine.attention.document_attention`` is, so that selective recomputation can keep its output.

    B  sequences    N  query heads           S  positions       G  query heads of a key head, N / K
                    K  key and value heads   H  width of one    R  queries of a block, T  the keys that they may see
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
"""Queries of a block."""


def attend_blockwise(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    starts_BS: Tensor | None = None,
) -> Tensor:
    """The output of causal attention, [B, S, N, H].

    Args:
        window, soft_cap: as in ``plan.model.attention_rule``.
        starts_BS: for each position the start of its document, int64, on any device; None for 0.
    """
    out_BSNH: Tensor = blockwise_attention(q_BSNH, k_BSKH, v_BSKH, starts_BS, window or 0, soft_cap or 0.0)[0]
    return out_BSNH


@torch.library.custom_op("superstep::blockwise_attention", mutates_args=())
def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, H] and its lse [B, N, S], fp32; 0 for no window and no cap."""
    out, lse = _empty(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    for mine, keys in _blocks(q.shape[1], window):
        scores, _ = _scores(q, k, mine, keys, soft_cap)
        scores.masked_fill_(_hidden(starts, mine, keys, window, q), -math.inf)
        lse_BKGR = scores.logsumexp(-1)
        weights = scores.sub_(lse_BKGR[..., None]).exp_().to(v.dtype)
        out[:, mine] = _by_token(weights @ _by_head(v[:, keys])[:, :, None], q.dtype)
        lse[:, :, mine] = lse_BKGR.flatten(1, 2)
    return out, lse


@torch.library.custom_op("superstep::blockwise_attention_backward", mutates_args=())
def _blockwise_attention_backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    window: int,
    soft_cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    dq, kv_heads, scale = _empty(q), k.shape[2], q.shape[-1] ** -0.5
    dk, dv = (torch.zeros_like(_by_head(x), dtype=torch.float32) for x in (k, v))
    lse_BKGS = lse.unflatten(1, (kv_heads, -1))
    for mine, keys in _blocks(q.shape[1], window):
        scores, slope = _scores(q, k, mine, keys, soft_cap)
        hidden = _hidden(starts, mine, keys, window, q)
        weights = scores.sub_(lse_BKGS[..., mine, None]).exp_().masked_fill_(hidden, 0.0)
        grad_here, out_here = (_by_group(x[:, mine], kv_heads) for x in (grad, out))
        dv[:, :, keys] += (weights.to(v.dtype).mT @ grad_here).sum(2)
        delta = (grad_here.float() * out_here.float()).sum(-1, keepdim=True)
        dscores = (grad_here @ _by_head(v[:, keys])[:, :, None].mT).float().sub_(delta).mul_(weights)
        if slope is not None:
            dscores.mul_(slope)
        dscores = dscores.mul_(scale).to(q.dtype)
        dq[:, mine] = _by_token(dscores @ _by_head(k[:, keys])[:, :, None], q.dtype)
        dk[:, :, keys] += (dscores.mT @ _by_group(q[:, mine], kv_heads)).sum(2)
    return dq, _by_token(dk[:, :, None], k.dtype).contiguous(), _by_token(dv[:, :, None], v.dtype).contiguous()


def _blocks(tokens: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Each block's queries, and the keys that they may see."""
    for first in range(0, tokens, BLOCK):
        end = min(first + BLOCK, tokens)
        yield slice(first, end), slice(max(0, first - window + 1) if window else 0, end)


def _scores(q: Tensor, k: Tensor, mine: slice, keys: slice, soft_cap: float) -> tuple[Tensor, Tensor | None]:
    """Scores after the cap, fp32 [B, K, G, R, T], and the cap's slope there; None without one."""
    scores = (_by_group(q[:, mine], k.shape[2]) @ _by_head(k[:, keys])[:, :, None].mT).float()
    scores.mul_(q.shape[-1] ** -0.5)
    if not soft_cap:
        return scores, None
    bent = scores.div_(soft_cap).tanh_()
    return bent * soft_cap, bent.square_().neg_().add_(1.0)


def _hidden(starts: Tensor | None, mine: slice, keys: slice, window: int, q: Tensor) -> Tensor:
    """The mask of hidden keys: [R, T], or [B, 1, 1, R, T] with documents."""
    place_R1 = torch.arange(mine.start, mine.stop, device=q.device)[:, None]
    place_T = torch.arange(keys.start, keys.stop, device=q.device)
    hidden = place_T > place_R1
    if window:
        hidden = hidden | (place_T <= place_R1 - window)
    if starts is not None:
        hidden = hidden | (place_T < starts[:, mine].to(q.device)[:, None, None, :, None])
    return hidden


def _by_head(x_BTKH: Tensor) -> Tensor:
    """[B, K, T, H]."""
    return x_BTKH.transpose(1, 2)


def _by_group(x_BRNH: Tensor, kv_heads: int) -> Tensor:
    """[B, K, G, R, H]."""
    grouped: Tensor = x_BRNH.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return grouped


def _by_token(x_BKGRH: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, R, N, H]."""
    return x_BKGRH.flatten(1, 2).transpose(1, 2).to(dtype)


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@blockwise_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int, soft_cap: float) -> tuple[Tensor, Tensor]:
    return _empty(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@_blockwise_attention_backward.register_fake
def _(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    window: int,
    soft_cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q), _empty(k), _empty(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    q, k, v, starts, ctx.window, ctx.soft_cap = inputs
    ctx.save_for_backward(q, k, v, *output, starts)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:  # noqa: ANN401
    gradients = _blockwise_attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.window, ctx.soft_cap)
    return *gradients, None, None, None


blockwise_attention.register_autograd(_backward, setup_context=_keep)

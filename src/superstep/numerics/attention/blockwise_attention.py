"""Attention by any rule in torch's operations, a block of queries at a time: windows, documents, capped scores, biases.

It is used if no fused kernel supports the rule. The backward pass computes the scores of a block again from the
log-sum-exp (lse), so that memory does not grow with the square of the sequence. It is a custom operator of torch, as
``engine.attention.document_attention`` is, so that selective recomputation can keep its output. A ring of ranks calls
``attend_part`` for each part of a sequence's keys.

    B  sequences    N  query heads           S  queries, T  keys      G  query heads of a key head, N / K
                    K  key and value heads   H  width of one head     R  queries of a block
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.numerics.attention.attention_operator import connect_gradients, empty, no_gradient
from superstep.numerics.attention.attention_sinks import join_sinks
from superstep.numerics.attention.score_bias import add_bias, add_bias_gradient
from superstep.numerics.soft_cap import soft_cap, soft_cap_slope_, tanh_for

BLOCK = 128
"""Queries of a block."""

LEAST_LSE = -1e30
"""The log-sum-exp of a query that sees no key of a part: merged with another part it has no weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """How scores follow from queries and keys, and which of them are hidden.

    Attributes:
        ahead: the place of the first query among the keys; beyond them where all keys are earlier.
        window: tokens that a token sees; 0 for all.
        soft_cap: as in ``plan.model.attention_rule``; 0 for none.
        bias: the tensor of a ``kernels.position_bias.Bias``.
        starts: int64 [B, S], the first key that each query sees, on any device; None for all.
    """

    ahead: int = 0
    window: int = 0
    soft_cap: float = 0.0
    bias: Tensor | None = None
    starts: Tensor | None = None

    def blocks(self, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
        """Each block's queries, and the keys that they may see, if there are any."""
        for first in range(0, queries, BLOCK):
            end, place = min(first + BLOCK, queries), self.ahead + first
            visible = slice(max(0, place - self.window + 1) if self.window else 0, min(self.ahead + end, keys))
            if visible.start < visible.stop:
                yield slice(first, end), visible

    def gap(self, mine: slice, keys: slice) -> int:
        """The place of a block's first query minus that of its first key."""
        return int(self.ahead + mine.start - keys.start)


def attend_blockwise(  # noqa: PLR0913
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    starts_BS: Tensor | None = None,
    sinks_BSN: Tensor | None = None,
) -> Tensor:
    """The output of causal attention, [B, S, N, H].

    Args:
        window, soft_cap: as in ``plan.model.attention_rule``.
        bias: the tensor of a ``kernels.position_bias.Bias``.
        starts_BS: for each position the start of its document, int64, on any device; None for 0.
        sinks_BSN: of each query (``numerics.attention.attention_sinks``).
    """
    settings = starts_BS, bias, sinks_BSN, window or 0, soft_cap or 0.0
    out_BSNH: Tensor = blockwise_attention(q_BSNH, k_BSKH, v_BSKH, *settings)[0]
    return out_BSNH


@torch.library.custom_op("superstep::blockwise_attention", mutates_args=())
def blockwise_attention(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    window: int,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, H] and its lse [B, N, S], fp32; 0 for no window and no cap."""
    out, lse = empty(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    attend_part(q, k, v, ScoreRule(window=window, soft_cap=soft_cap, bias=bias, starts=starts), out, lse)
    return join_sinks(out, lse, sinks)


@torch.library.custom_op("superstep::blockwise_attention_backward", mutates_args=())
def _blockwise_attention_backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    bias: Tensor | None,
    window: int,
    soft_cap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the bias."""
    rule = ScoreRule(window=window, soft_cap=soft_cap, bias=bias, starts=starts)
    dq, dk, dv = empty(q), *(torch.zeros_like(_by_head(x), dtype=torch.float32) for x in (k, v))
    dbias = no_gradient(q) if bias is None else torch.zeros_like(bias, memory_format=torch.contiguous_format)
    attend_part_backward((grad, q, k, v, out, lse), rule, (dq, dk, dv, dbias))
    dk, dv = (_by_token(x[:, :, None], k.dtype).contiguous() for x in (dk, dv))
    return dq, dk, dv, dbias


connect_gradients(blockwise_attention, _blockwise_attention_backward)


def attend_part(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, out: Tensor, lse: Tensor) -> None:
    """Write the output [B, S, N, H] and lse [B, N, S] of attention to a run of keys. Queries without a block of keys
    are left as they are; others that see no key get ``LEAST_LSE``, and an output of 0.
    """
    for mine, keys in rule.blocks(q.shape[1], k.shape[1]):
        scores = _hide_(_scores(q, k, mine, keys, rule), _hidden(rule, mine, keys, q))
        most_BKGR1 = scores.amax(-1, keepdim=True).clamp_(min=LEAST_LSE)
        weights = scores.sub_(most_BKGR1).exp_()
        sums_BKGR1 = weights.sum(-1, keepdim=True)
        weights = weights.div_(sums_BKGR1.clamp_min(1e-30)).to(v.dtype)
        out[:, mine] = _by_token(weights @ _by_head(v[:, keys])[:, :, None], out.dtype)
        lse[:, :, mine] = (sums_BKGR1.log_().add_(most_BKGR1)).clamp_(min=LEAST_LSE).squeeze(-1).flatten(1, 2)


def attend_part_backward(of: tuple[Tensor, ...], rule: ScoreRule, to: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """The gradients of a run of keys.

    Args:
        of: the output's gradient, q, k, v, and the output and lse of all keys.
        to: the gradient of q, [B, S, N, H], which is written; those of k and v, fp32 [B, K, T, H], and of the bias,
            which are added to.
    """
    (grad, q, k, v, out, lse), (dq, dk, dv, dbias) = of, to
    kv_heads, scale = k.shape[2], q.shape[-1] ** -0.5
    lse_BKGS = lse.unflatten(1, (kv_heads, -1))
    for mine, keys in rule.blocks(q.shape[1], k.shape[1]):
        scores = _scores(q, k, mine, keys, rule)
        slope = soft_cap_slope_(scores.clone(), rule.soft_cap) if rule.soft_cap else None
        weights = _hide_(scores, _hidden(rule, mine, keys, q)).sub_(lse_BKGS[..., mine, None]).exp_()
        grad_here, out_here = (_by_group(x[:, mine], kv_heads) for x in (grad, out))
        dv[:, :, keys] += (weights.to(v.dtype).mT @ grad_here).sum(2)
        delta = (grad_here.float() * out_here.float()).sum(-1, keepdim=True)
        dscores = (grad_here @ _by_head(v[:, keys])[:, :, None].mT).float().sub_(delta).mul_(weights)
        if slope is not None:
            dscores.mul_(slope)
        q_here, gap, by_bias = _by_group(q[:, mine], kv_heads), rule.gap(mine, keys), None
        if rule.bias is not None:
            by_bias = add_bias_gradient(dscores, q_here, rule.bias, gap, dbias)
        dscores = dscores.mul_(scale).to(q.dtype)
        dq_here = dscores @ _by_head(k[:, keys])[:, :, None]
        dq[:, mine] = _by_token(dq_here if by_bias is None else by_bias.add_(dq_here), dq.dtype)
        dk[:, :, keys] += (dscores.mT @ q_here).sum(2)


def _scores(q: Tensor, k: Tensor, mine: slice, keys: slice, rule: ScoreRule) -> Tensor:
    """Scores after bias and cap, fp32 [B, K, G, R, T]."""
    q_here = _by_group(q[:, mine], k.shape[2])
    scores = (q_here @ _by_head(k[:, keys])[:, :, None].mT).float()
    scores.mul_(q.shape[-1] ** -0.5)
    if rule.bias is not None:
        add_bias(scores, q_here, rule.bias, rule.gap(mine, keys))
    return soft_cap(scores, rule.soft_cap, tanh_for(q)) if rule.soft_cap else scores


def _hide_(scores: Tensor, hidden: Tensor) -> Tensor:
    """Set hidden scores to -inf: by adding it, which on a CPU takes a tenth of a masked fill's time."""
    return scores.add_(torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -math.inf))


def _hidden(rule: ScoreRule, mine: slice, keys: slice, q: Tensor) -> Tensor:
    """The mask of hidden keys: [R, T], or [B, 1, 1, R, T] with documents."""
    place_R1 = torch.arange(rule.ahead + mine.start, rule.ahead + mine.stop, device=q.device)[:, None]
    place_T = torch.arange(keys.start, keys.stop, device=q.device)
    hidden = place_T > place_R1
    if rule.window:
        hidden = hidden | (place_T <= place_R1 - rule.window)
    if rule.starts is not None:
        hidden = hidden | (place_T < rule.starts[:, mine].to(q.device)[:, None, None, :, None])
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

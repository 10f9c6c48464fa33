"""A decoder of the Llama, Mistral and Qwen families, as one would write it for one device.

It has no parallelism. Two conventions let ``engine`` shard the modules from outside. The number of heads is read from
the projection's output, never from the shape. Attention, and the dispatch of a mixture of experts, are arguments.

    B  sequences              D  width of the residual stream
    S  positions              F  inner width of the feed-forward
    N  query heads            H  width of one head
    K  key and value heads    V  vocabulary

Module names are Hugging Face's, so that a parameter's global name is its name here with a prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from superstep.kernels.blockwise_attention import attend_blockwise
from superstep.model.expert_dispatch import ExpertDispatch, LocalDispatch
from superstep.model.feedforward import FeedForward
from superstep.model.fused_attention import expand_heads, fused_attention
from superstep.model.moe import MixtureOfExperts
from superstep.model.norm import RMSNorm
from superstep.model.rope import Rope
from superstep.plan.model.attention_rule import PLAIN, AttentionRule
from superstep.plan.model.shape import ModelShape


class Attend(Protocol):
    """Causal attention by a layer's rule. Each key and value head serves N / K neighbouring query heads."""

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, rule: AttentionRule = PLAIN, /) -> Tensor:
        """The attention output: [B, S, N, H]."""


def flash(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
    """Torch's fused attention: the scores are never whole in memory (Dao 2022). Scores with a soft cap, which it does
    not have, are computed for a block of queries at a time.
    """
    window = rule.window_in(q_BSNH.shape[1])
    if rule.soft_cap is not None:
        return attend_blockwise(q_BSNH, k_BSKH, v_BSKH, window=window, soft_cap=rule.soft_cap)
    if window is not None:
        return sliding_attention(q_BSNH, k_BSKH, v_BSKH, window)
    q_BNSH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
    return fused_attention(q_BNSH, k_BKSH, v_BKSH).transpose(1, 2)


def sliding_attention(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, window: int) -> Tensor:
    """Attention of each token to itself and the ``window - 1`` tokens before it (Mistral, Jiang 2023): [B, S, N, H].

    Queries are computed in blocks of a window, each with the keys of its own block and of the one before.
    """
    if q_BSNH.is_cuda:  # expand each key once, because two blocks of queries use it
        k_BSKH, v_BSKH = (
            expand_heads(x.transpose(1, 2), q_BSNH.transpose(1, 2)).transpose(1, 2) for x in (k_BSKH, v_BSKH)
        )
    return torch.cat(list(_blocks(q_BSNH, k_BSKH, v_BSKH, window)), 1)


def _blocks(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, window: int) -> Iterator[Tensor]:
    place_S = torch.arange(q_BSNH.shape[1], device=q_BSNH.device)
    for start in range(0, q_BSNH.shape[1], window):
        mine, visible = slice(start, start + window), slice(max(0, start - window + 1), start + window)
        back = place_S[mine, None] - place_S[visible]
        q_BNsH, k_BKtH, v_BKtH = (x.transpose(1, 2) for x in (q_BSNH[:, mine], k_BSKH[:, visible], v_BSKH[:, visible]))
        is_visible = (back >= 0) & (back < window)
        yield fused_attention(q_BNsH, k_BKtH, v_BKtH, is_visible).transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie 2023); with ``qk_norm``, queries and keys are normalised per head."""

    def __init__(self, shape: ModelShape, rope: Rope, layer: int = 0) -> None:
        super().__init__()
        self.head_dim, self.rope, self.rule = shape.head_dim, rope, shape.rule(layer)
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()

    def forward(self, x_BSD: Tensor, *, attend: Attend | None = None, positions: Tensor | None = None) -> Tensor:
        B, S, _ = x_BSD.shape
        q_BSNH = self.q_norm(self.q_proj(x_BSD).view(B, S, -1, self.head_dim))
        k_BSKH = self.k_norm(self.k_proj(x_BSD).view(B, S, -1, self.head_dim))
        v_BSKH = self.v_proj(x_BSD).view(B, S, -1, self.head_dim)
        q_BSNH, k_BSKH = self.rope(q_BSNH, positions), self.rope(k_BSKH, positions)
        out_BSNH = (attend or flash)(q_BSNH, k_BSKH, v_BSKH, self.rule)
        out_BSD: Tensor = self.o_proj(out_BSNH.flatten(2))
        return out_BSD


class Embedding(nn.Module):
    """Maps tokens to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        h_BSD: Tensor = self.embed_tokens(tokens_BS)
        return h_BSD


class Block(nn.Module):
    """One layer: attention, then feed-forward or a mixture of them, each added to the residual stream."""

    def __init__(self, shape: ModelShape, rope: Rope, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape, rope, layer)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = MixtureOfExperts(shape, layer) if shape.moe else FeedForward(shape.width, shape.ffn)
        self.dropout = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()

    def forward(
        self,
        h_BSD: Tensor,
        *,
        attend: Attend | None = None,
        positions: Tensor | None = None,
        exchange: ExpertDispatch | None = None,
    ) -> Tensor:
        # No name holds attention's output, which would be there in the feed-forward too.
        h_BSD = h_BSD + self.dropout(
            self.self_attn(self.input_layernorm(h_BSD), attend=attend, positions=positions),
        )
        given = {"exchange": exchange or LocalDispatch()} if isinstance(self.mlp, MixtureOfExperts) else {}
        h_BSD = h_BSD + self.dropout(self.mlp(self.post_attention_layernorm(h_BSD), **given))
        return h_BSD


class Head(nn.Module):
    """The final norm, and the projection to logits."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, h_BSD: Tensor) -> Tensor:
        logits_BSV: Tensor = self.lm_head(self.norm(h_BSD))
        return logits_BSV


class Decoder(nn.Module):
    """All units in sequence: the model on one device, and the reference for every layout of it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        rope = Rope(shape)
        self.embed = Embedding(shape)
        self.block = nn.ModuleList(Block(shape, rope, layer) for layer in range(shape.layers))
        self.head = Head(shape)
        if shape.tied:
            self.head.lm_head.weight = self.embed.embed_tokens.weight

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        attend: Attend | None = None,
        positions: Tensor | None = None,
        exchange: ExpertDispatch | None = None,
    ) -> Tensor:
        """The logits: [B, S, V]."""
        h_BSD = self.embed(tokens_BS)
        for block in self.block:
            h_BSD = block(h_BSD, attend=attend, positions=positions, exchange=exchange)
        logits_BSV: Tensor = self.head(h_BSD)
        return logits_BSV

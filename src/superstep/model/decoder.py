"""A decoder of the families in ``plan.model.hf_families``, as one would write it for one device.

``plan.model.style`` says how the blocks of a family differ from Llama's. The decoder has no parallelism. Two
conventions let ``engine`` shard the modules from outside. The number of heads is read from the projection's output,
never from the shape. Attention, and the dispatch of a mixture of experts, are arguments.

    B  sequences              D  width of the residual stream
    S  positions              F  inner width of the feed-forward
    N  query heads            H  width of one head
    K  key and value heads    V  vocabulary

Module names are Hugging Face's, so that a parameter's global name is its name here with a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.kernels.position_bias import Bias
from superstep.model.feedforward import FeedForward
from superstep.model.fused_attention import expand_heads, fused_attention
from superstep.model.mixers.gated_delta import GatedDelta, Scan
from superstep.model.mixture.expert_dispatch import ExpertDispatch, LocalDispatch
from superstep.model.moe import MixtureOfExperts
from superstep.model.norm import RMSNorm
from superstep.model.position_bias import make_position_bias
from superstep.model.rope import Rope, layer_ropes
from superstep.model.sinks import AttentionSinks, OutputBias
from superstep.numerics.attention.blockwise_attention import attend_blockwise
from superstep.numerics.soft_cap import soft_cap
from superstep.plan.model.attention_rule import PLAIN, AttentionRule
from superstep.plan.model.rope import YarnRope
from superstep.plan.model.shape import ModelShape
from superstep.plan.model.style import NORM_NAMES


class Attend(Protocol):
    """Causal attention by a layer's rule. Each key and value head serves N / K neighbouring query heads."""

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        rule: AttentionRule = PLAIN,
        bias: Bias | None = None,
        sinks_BSN: Tensor | None = None,
        /,
    ) -> Tensor:
        """The attention output: [B, S, N, H]. Each query's softmax has its sink, if there are any."""


def flash(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    rule: AttentionRule = PLAIN,
    bias: Bias | None = None,
    sinks_BSN: Tensor | None = None,
) -> Tensor:
    """Torch's fused attention: the scores are never whole in memory (Dao 2022). Soft caps, biases and sinks, which it
    does not have, are computed for a block of queries at a time.
    """
    window = rule.window_in(q_BSNH.shape[1])
    if rule.soft_cap is not None or bias is not None or sinks_BSN is not None:
        qkv, tensor = (q_BSNH, k_BSKH, v_BSKH), None if bias is None else bias.tensor
        return attend_blockwise(*qkv, window=window, soft_cap=rule.soft_cap, bias=tensor, sinks_BSN=sinks_BSN)
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
    """Grouped-query attention (Ainslie 2023); with ``qk_norm``, queries and keys are normalised, per head or whole.
    They are rotated by position, or scores have a position bias.
    """

    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, shape: ModelShape, rope: Rope, layer: int = 0) -> None:
        super().__init__()
        self.head_dim, self.rope, self.rule = shape.head_dim, rope, shape.rule(layer)
        self.has_gate, self.rotated = shape.style.output_gate, shape.rotated
        queries = (2 if self.has_gate else 1) * shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.width, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.is_wide, scale = shape.has_wide_qk_norm, shape.style.query_scale
        self.query_factor = 1.0 if scale is None else scale * math.sqrt(shape.head_dim)
        for name, heads in (("q_norm", shape.heads), ("k_norm", shape.kv_heads)):
            width = shape.head_dim * (heads if self.is_wide else 1)
            norm = RMSNorm(width, shape.norm_eps, shape.style.norm_offset) if shape.qk_norm else nn.Identity()
            self.add_module(name, norm)
        self.gate_fn = nn.Sigmoid() if self.has_gate else nn.Identity()
        self.position_bias = make_position_bias(shape)
        self.sinks = AttentionSinks(shape.heads) if shape.style.attention_sinks else None
        self.out_bias = OutputBias(shape.width) if shape.style.out_bias else None

    def forward(self, x_BSD: Tensor, *, attend: Attend | None = None, positions: Tensor | None = None) -> Tensor:
        B, S, _ = x_BSD.shape
        heads = B, S, -1, self.head_dim
        q, k, v_BSKH = self.q_proj(x_BSD), self.k_proj(x_BSD), self.v_proj(x_BSD).view(heads)
        gate = None
        if self.has_gate:
            q, gate = q.view(B, S, -1, 2 * self.head_dim).chunk(2, -1)
        if self.is_wide:
            q_BSNH, k_BSKH = self.q_norm(q).view(heads), self.k_norm(k).view(heads)
        else:
            q_BSNH, k_BSKH = self.q_norm(q.reshape(heads)), self.k_norm(k.view(heads))
        if self.query_factor != 1.0:  # attention divides by sqrt(head_dim)
            q_BSNH = q_BSNH * self.query_factor
        bias = None if self.position_bias is None else self.position_bias(q_BSNH)
        sinks = None if self.sinks is None else self.sinks(q_BSNH)
        if bias is None:
            q_BSNH, k_BSKH = self._rotate(q_BSNH, positions), self._rotate(k_BSKH, positions)
        others = () if bias is None and sinks is None else (bias, sinks)
        out_BSNH = (attend or flash)(q_BSNH, k_BSKH, v_BSKH, self.rule, *others)
        if gate is not None:
            out_BSNH = out_BSNH * self.gate_fn(gate)
        out_BSD: Tensor = self.o_proj(out_BSNH.flatten(2))
        return out_BSD if self.out_bias is None else self.out_bias(out_BSD)

    def _rotate(self, x_BSNH: Tensor, positions: Tensor | None) -> Tensor:
        if self.rotated == self.head_dim:
            return self.rope(x_BSNH, positions)
        turned, other = x_BSNH.split((self.rotated, self.head_dim - self.rotated), -1)
        return torch.cat((self.rope(turned, positions), other), -1)


class LatentAttention(nn.Module):
    """Attention with queries and keys through narrow widths (DeepSeek-V2, sec. 2.1). All heads share one rotated key.

    Values are padded to the width of queries and keys, as kernels have one width for all three.
    """

    def __init__(self, shape: ModelShape, rope: Rope, layer: int = 0) -> None:
        super().__init__()
        assert shape.latent is not None
        self.latent, self.rope, self.rule, self.head_dim = shape.latent, rope, shape.rule(layer), shape.head_dim
        latent, wide = shape.latent, shape.heads * shape.head_dim
        queries = wide + shape.heads * latent.rotated
        if latent.query_rank is None:
            self.q_proj = nn.Linear(shape.width, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(shape.width, latent.query_rank, bias=False)
            self.q_a_layernorm = RMSNorm(latent.query_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(latent.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.width, latent.key_rank + latent.rotated, bias=False)
        self.kv_a_layernorm = RMSNorm(latent.key_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(latent.key_rank, 2 * wide, bias=False)
        self.o_proj = nn.Linear(wide, shape.width, bias=False)
        self.share = SharedKey()
        scaling = shape.rope_scaling
        self.query_factor = scaling.score_factor if isinstance(scaling, YarnRope) else 1.0

    def forward(self, x_BSD: Tensor, *, attend: Attend | None = None, positions: Tensor | None = None) -> Tensor:
        H, R = self.head_dim, self.latent.rotated
        if self.latent.query_rank is None:
            queries = self.q_proj(x_BSD)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        q_BSNX = queries.unflatten(-1, (-1, H + R))
        narrow, key = self.kv_a_proj_with_mqa(x_BSD).split((self.latent.key_rank, R), -1)
        k_BSNH, v_BSNH = self.kv_b_proj(self.kv_a_layernorm(narrow)).unflatten(-1, (-1, 2 * H)).split(H, -1)
        key_BSNR = self.share(self._rotate(key.unsqueeze(2), positions), k_BSNH)
        if self.query_factor != 1.0:
            q_BSNX = q_BSNX * self.query_factor
        q_BSNX = torch.cat((q_BSNX[..., :H], self._rotate(q_BSNX[..., H:], positions)), -1)
        qkv = q_BSNX, torch.cat((k_BSNH, key_BSNR), -1), F.pad(v_BSNH, (0, R))
        out_BSD: Tensor = self.o_proj((attend or flash)(*qkv, self.rule)[..., :H].flatten(2))
        return out_BSD

    def _rotate(self, x_BSNR: Tensor, positions: Tensor | None) -> Tensor:
        # Pairs lie side by side in these models; the rotary embedding has them half a head apart.
        return self.rope(x_BSNR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), positions)


LATENT_EPS = 1e-6
"""Of the norms of narrow widths, which transformers takes from no file."""


class SharedKey(nn.Module):
    """The rotated key that all heads share, for each head of this rank."""

    def forward(self, key_BS1R: Tensor, like_BSNH: Tensor) -> Tensor:
        """[B, S, N, R]."""
        return key_BS1R.expand(-1, -1, like_BSNH.shape[2], -1)


class Embedding(nn.Module):
    """Maps tokens to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.scale = shape.embedding_scale

    def forward(self, tokens_BS: Tensor) -> Tensor:
        h_BSD: Tensor = self.embed_tokens(tokens_BS)
        if self.scale == 1.0:
            return h_BSD
        # As in the published models, the factor itself is rounded to the dtype of the stream.
        return h_BSD * torch.tensor(self.scale).to(h_BSD.dtype).item()


class Block(nn.Module):
    """One layer: attention, or linear attention, then feed-forward or a mixture of them, each added to the residual
    stream. Norms stand before them, after them, or both.
    """

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(self, shape: ModelShape, rope: Rope, layer: int = 0) -> None:
        super().__init__()
        self.norms, self.scale = NORM_NAMES[shape.style.norms], shape.style.residual_scale
        before, after, before_inner, after_inner = self.norms
        self._make_norms(shape, before)
        shape = shape.at(layer)
        if shape.latent is not None:
            self.add_module("self_attn", LatentAttention(shape, rope, layer))
        elif shape.delta is None:
            self.self_attn = Attention(shape, rope, layer)
        else:
            self.linear_attn = GatedDelta(shape, RMSNorm(shape.delta.value_dim, shape.norm_eps))
        self._make_norms(shape, after, before_inner)
        self.mlp = (
            MixtureOfExperts(shape, layer) if shape.moe else FeedForward(shape.width, shape.ffn, shape.style.gate)
        )
        self._make_norms(shape, after_inner)
        self.dropout = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()

    def _make_norms(self, shape: ModelShape, *names: str | None) -> None:
        for name in filter(None, names):
            self.add_module(name, RMSNorm(shape.width, shape.norm_eps, shape.style.norm_offset))

    def forward(
        self,
        h_BSD: Tensor,
        *,
        attend: Attend | None = None,
        positions: Tensor | None = None,
        scan: Scan | None = None,
        exchange: ExpertDispatch | None = None,
    ) -> Tensor:
        before, after, before_inner, after_inner = self.norms
        # Attention's output has no name, so that its memory is free before the feed-forward runs.
        mixing = {"scan": scan} if isinstance(self.mixer, GatedDelta) else {"attend": attend, "positions": positions}
        h_BSD = self._add(h_BSD, self._norm(after, self.mixer(self._read(before, h_BSD), **mixing)))
        given = {"exchange": exchange or LocalDispatch()} if isinstance(self.mlp, MixtureOfExperts) else {}
        return self._add(h_BSD, self._norm(after_inner, self.mlp(self._read(before_inner, h_BSD), **given)))

    @property
    def mixer(self) -> Attention | LatentAttention | GatedDelta:
        """The layer in which tokens see each other."""
        mixer = self._modules.get("self_attn", self._modules.get("linear_attn"))
        assert isinstance(mixer, Attention | LatentAttention | GatedDelta)
        return mixer

    def _read(self, norm: str | None, h_BSD: Tensor) -> Tensor:
        # The view is a node of the graph. There the gradients of all readers of the stream are summed, before their sum
        # is added to the stream's own gradient. So the order of the sum is the same on every layout.
        return h_BSD.view_as(h_BSD) if norm is None else self._norm(norm, h_BSD)

    def _norm(self, name: str | None, x_BSD: Tensor) -> Tensor:
        if name is None:
            return x_BSD
        out_BSD: Tensor = self.get_submodule(name)(x_BSD)
        return out_BSD

    def _add(self, h_BSD: Tensor, added_BSD: Tensor) -> Tensor:
        added_BSD = self.dropout(added_BSD)
        return h_BSD + (added_BSD if self.scale == 1.0 else added_BSD * self.scale)


class SoftCap(nn.Module):
    """cap · tanh(x / cap): numbers stay below ``cap`` in size (Gemma 2, sec. 2)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return soft_cap(x, self.cap)


class Head(nn.Module):
    """The final norm, and the projection to logits."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.width, shape.norm_eps, shape.style.norm_offset)
        self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.soft_cap = nn.Identity() if shape.style.logit_cap is None else SoftCap(shape.style.logit_cap)
        self.scale = 1.0 / shape.style.logit_divisor

    @property
    def logit_cap(self) -> float | None:
        return self.soft_cap.cap if isinstance(self.soft_cap, SoftCap) else None

    def forward(self, h_BSD: Tensor, further_BSD: Tensor | None = None) -> Tensor:
        """The logits, [B, S, V]; with what multi-token prediction gives, its logits after them: [2 · B, S, V]."""
        h_BSD = self.norm(h_BSD)
        if further_BSD is not None:
            h_BSD = torch.cat((h_BSD, further_BSD))
        if self.scale != 1.0:
            h_BSD = h_BSD * self.scale
        logits_BSV: Tensor = self.soft_cap(self.lm_head(h_BSD))
        return logits_BSV


class Decoder(nn.Module):
    """All units in sequence: the model on one device, and the reference for every layout of it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed = Embedding(shape)
        self.block = nn.ModuleList(Block(shape, rope, layer) for layer, rope in enumerate(layer_ropes(shape)))
        self.head = Head(shape)
        if shape.tied:
            self.head.lm_head.weight = self.embed.embed_tokens.weight

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        attend: Attend | None = None,
        positions: Tensor | None = None,
        scan: Scan | None = None,
        exchange: ExpertDispatch | None = None,
    ) -> Tensor:
        """The logits: [B, S, V]."""
        h_BSD = self.embed(tokens_BS)
        for block in self.block:
            h_BSD = block(h_BSD, attend=attend, positions=positions, scan=scan, exchange=exchange)
        logits_BSV: Tensor = self.head(h_BSD)
        return logits_BSV

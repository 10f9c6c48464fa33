"""A Llama- or Qwen3-style decoder, as one would write it for one device.

Nothing here knows of parallelism. Two habits let ``runtime`` cut the modules from outside: the number of
heads is read off the projection's output, never off the shape; attention, and the exchange of a mixture of
experts, are arguments.

    B  sequences              D  width of the residual stream
    S  positions              F  inner width of the feed-forward
    N  query heads            H  width of one head
    K  key and value heads    V  vocabulary

Module names are Hugging Face's, so that a parameter's global name is its name here behind a prefix.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from superstep.model.exchange import Exchange, Local
from superstep.model.feedforward import FeedForward
from superstep.model.moe import MixtureOfExperts
from superstep.model.norm import RMSNorm
from superstep.plan.model.shape import ModelShape


class Attend(Protocol):
    """Causal attention. Each key and value head serves N / K neighbouring query heads."""

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, /) -> Tensor:
        """The mixed values: [B, S, N, H]."""


def flash(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
    """Torch's fused attention: the scores are never whole in memory (Dao 2022)."""
    q_BNSH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
    out_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=True)
    return out_BNSH.transpose(1, 2)


class Rope:
    """The rotary position embedding (Su 2021), with Llama 3.1's stretch of the long wavelengths.

    One object serves all blocks, so that the tables of a sequence length are made once, and those of given positions
    once for as long as these are there: what is computed again finds the tables that it had. It is no module and holds
    no parameter: tables are made on the device of what they turn, when it first comes by.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.head_dim = shape.head_dim
        self.theta = shape.rope_theta
        self.scaling = shape.rope_scaling
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._given: MutableMapping[Tensor, dict[torch.dtype, tuple[Tensor, Tensor]]] = WeakTensorKeyDictionary()

    def __call__(self, x_BSNH: Tensor, positions: Tensor | None = None) -> Tensor:
        """Turns each pair (i, i + H/2) of a head by position · frequency i, as Hugging Face does.

        Args:
            x_BSNH: queries or keys.
            positions: [S] or [B, S]; None means 0, 1, ... S - 1. Not to be written to after it was given.
        """
        cos, sin = self._whole(x_BSNH) if positions is None else self._at(positions, x_BSNH.dtype)
        # sin carries the sign of its half, so that turning is one product, one roll and one multiply-add.
        return torch.addcmul(x_BSNH * cos, x_BSNH.roll(self.head_dim // 2, -1), sin)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, [..., S, 1, H], computed in fp32 and rounded once to ``dtype``."""
        angle = positions[..., None].float() * self._frequencies(positions.device)
        cos, sin = angle.cos(), angle.sin()
        cos, signed = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos.to(dtype).unsqueeze(-2), signed.to(dtype).unsqueeze(-2)

    def _whole(self, x_BSNH: Tensor) -> tuple[Tensor, Tensor]:
        tokens, device, dtype = x_BSNH.shape[1], x_BSNH.device, x_BSNH.dtype
        if torch.compiler.is_compiling():  # the compiler fuses the tables into their use
            return self.tables(torch.arange(tokens, device=device), dtype)
        key = (tokens, device, dtype)
        if key not in self._tables:
            # A table made under inference_mode could not be saved for a later backward.
            with torch.inference_mode(mode=False):
                self._tables[key] = self.tables(torch.arange(tokens, device=device), dtype)
        return self._tables[key]

    def _at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return self.tables(positions, dtype)
        made = self._given.setdefault(positions, {})
        if dtype not in made:
            with torch.inference_mode(mode=False):
                made[dtype] = self.tables(positions, dtype)
        return made[dtype]

    def _frequencies(self, device: torch.device) -> Tensor:
        """Radians a position, [H/2], fp32."""
        pair = torch.arange(0, self.head_dim, 2, device=device).float()
        frequency = 1.0 / self.theta ** (pair / self.head_dim)
        if self.scaling is None:
            return frequency
        # Turns within the original context: many stay, few are slowed by the factor, between them is a ramp.
        low, high = self.scaling.low_freq_factor, self.scaling.high_freq_factor
        turns = self.scaling.original_tokens * frequency / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return keep * frequency + (1.0 - keep) * frequency / self.scaling.factor


class Attention(nn.Module):
    """Grouped-query attention (Ainslie 2023); with ``qk_norm``, queries and keys are normalised per head."""

    def __init__(self, shape: ModelShape, rope: Rope) -> None:
        super().__init__()
        self.head_dim, self.rope = shape.head_dim, rope
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()

    def forward(self, x_BSD: Tensor, *, attend: Attend = flash, positions: Tensor | None = None) -> Tensor:
        B, S, _ = x_BSD.shape
        q_BSNH = self.q_norm(self.q_proj(x_BSD).view(B, S, -1, self.head_dim))
        k_BSKH = self.k_norm(self.k_proj(x_BSD).view(B, S, -1, self.head_dim))
        v_BSKH = self.v_proj(x_BSD).view(B, S, -1, self.head_dim)
        out_BSNH = attend(self.rope(q_BSNH, positions), self.rope(k_BSKH, positions), v_BSKH)
        out_BSD: Tensor = self.o_proj(out_BSNH.flatten(2))
        return out_BSD


class Embedding(nn.Module):
    """Tokens to the residual stream."""

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
        self.self_attn = Attention(shape, rope)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = MixtureOfExperts(shape, layer) if shape.moe else FeedForward(shape.width, shape.ffn)

    def forward(
        self,
        h_BSD: Tensor,
        *,
        attend: Attend = flash,
        positions: Tensor | None = None,
        exchange: Exchange | None = None,
    ) -> Tensor:
        h_BSD = h_BSD + self.self_attn(self.input_layernorm(h_BSD), attend=attend, positions=positions)
        given = {"exchange": exchange or Local()} if isinstance(self.mlp, MixtureOfExperts) else {}
        h_BSD = h_BSD + self.mlp(self.post_attention_layernorm(h_BSD), **given)
        return h_BSD


class Head(nn.Module):
    """The last norm, and the logits."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, h_BSD: Tensor) -> Tensor:
        logits_BSV: Tensor = self.lm_head(self.norm(h_BSD))
        return logits_BSV


class Decoder(nn.Module):
    """All units in a row: the model on one device, and the reference for every layout of it."""

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
        attend: Attend = flash,
        positions: Tensor | None = None,
        exchange: Exchange | None = None,
    ) -> Tensor:
        """The logits: [B, S, V]."""
        h_BSD = self.embed(tokens_BS)
        for block in self.block:
            h_BSD = block(h_BSD, attend=attend, positions=positions, exchange=exchange)
        logits_BSV: Tensor = self.head(h_BSD)
        return logits_BSV

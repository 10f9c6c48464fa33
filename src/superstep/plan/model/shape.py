"""ModelShape: the numbers of a decoder, and the catalogue of named sizes.

Llama 3 shapes are those of the published ``config.json`` files (Dubey 2024, table 3); Qwen3 shapes those of the Qwen3
report (Yang 2025, tables 1 and 2) and its ``config.json`` files, Qwen2.5's of theirs; Mistral's and Mixtral's those of
``mistralai/Mistral-7B-v0.1`` and ``Mixtral-8x7B-v0.1`` (Jiang 2023, 2024); OLMo's, Gemma's and gpt-oss's (OpenAI
2025, table 1) those of their ``config.json`` files. GPT-3 175B (Brown 2020, table 2.1) and Megatron's model of a
trillion (Narayanan 2021, table 1) have a feed-forward of two matrices and width 4 · D; the decoder here has three, so
"gpt3-175b" and "1t" take the width with the same number of parameters, 8/3 · D, in multiples of 256.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from superstep.plan.config import Positions, Router
from superstep.plan.model.attention_rule import AttentionRule, DeltaShape
from superstep.plan.model.rope import RopeScaling
from superstep.plan.model.style import LLAMA, BlockStyle

MOST_LAYERS, MOST_HEADS, MOST_EXPERTS, MOST_VOCAB = 2048, 1 << 16, 1 << 16, 1 << 24
MOST_DISTANCE = 1 << 16
MOST_NUMBERS = 1 << 46
"""The most elements of one matrix, with all experts: 70 trillion, so that ``MOST_LAYERS`` of them fit in 64 bits."""

Family = Literal["llama", "qwen3"]

T5_BUCKETS = 32
"""Rows of a table of T5's position biases (Raffel 2020, sec. 2.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """The mixture of experts that replaces the feed-forward of every block.

    Attributes:
        experts: experts to choose from (E), each a feed-forward of the model's ``ffn``.
        experts_per_token: experts for each token (k).
        shared_experts: experts that every token uses in addition, side by side.
        renormalise: whether the weights of a token's experts sum to one; only dropless has the choice.
        capacity_factor: an expert's capacity over its even share of a sequence; None where nothing is dropped.
        balance_weight: of the loss that spreads tokens over the experts, in each layer.
        z_weight: of the loss that keeps the router's logits small (Zoph 2022, eq. 5).
        groups, groups_per_token: with sigmoid, groups of neighbouring experts, and how many of them a token may choose
            from.
        scale: with sigmoid, multiplies the weights of a token's experts.
    """

    router: Router
    experts: int
    experts_per_token: int
    shared_experts: int
    renormalise: bool
    capacity_factor: float | None
    balance_weight: float
    z_weight: float
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0

    @property
    def logits(self) -> int:
        """The router's outputs for a token: one for each expert, and the noise's spread with noisy-topk."""
        return 2 * self.experts if self.router == "noisy-topk" else self.experts

    def capacity(self, tokens: int) -> int | None:
        """An expert's capacity in a sequence of ``tokens``; None for all of them."""
        if self.capacity_factor is None:
            return None
        return math.ceil(self.capacity_factor * self.experts_per_token * tokens / self.experts)


ROTATED = 64
"""Rotated numbers of a head in latent attention, beside the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention with queries and keys through narrow widths (DeepSeek-V2, sec. 2.1); a head has ``head_dim`` numbers
    for values and for the part that is not rotated, and ``rotated`` that are. ``query_rank``, ``key_rank``: the narrow
    widths; queries may come from the stream itself, with a rank of None (Moonlight).
    """

    query_rank: int | None
    key_rank: int
    rotated: int = ROTATED

    @property
    def narrow(self) -> int:
        """Both narrow widths together."""
        return (self.query_rank or 0) + self.key_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A whole decoder of the families that ``model.decoder`` has; and what pricing needs of DeepSeek's.

    Attributes:
        width: the residual stream (D); heads · head_dim may differ from it.
        ffn: the inner width of the gated feed-forward, of one expert in a mixture (F).
        max_tokens: the longest sequence of the published model's training.
        qkv_bias: whether queries, keys and values have biases (Qwen2).
        window: tokens that a token sees, itself and those before it (Mistral); None for all.
        full_layers: in a model with a window, the numbers of the layers that see all tokens nonetheless (Gemma); in one
            with linear attention, those with attention (Qwen3-Next).
        positions: how attention knows the positions of tokens.
        max_distance: with learnt position biases, the distance from which on all have the last one.
        style: how its blocks differ from Llama's.
        mtp_weight: of the loss of a second predicted token; None for one token.
        init_std: of the normal distribution of initial matrices.
        dropout: the share of the outputs of attention and feed-forward that training drops.
        moe: the experts of each block; None for one feed-forward.
        dense_layers, dense_ffn: blocks before the first with experts, and their feed-forward's inner width.
        latent: narrow widths of attention; None for plain attention.
        delta: linear attention of the layers that are not in ``full_layers``; None for attention in all of them.
    """

    family: Family
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_tokens: int
    qkv_bias: bool = False
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    positions: Positions = "rope"
    max_distance: int = 128
    mtp_weight: float | None = None
    style: BlockStyle = LLAMA
    init_std: float = 0.02
    dropout: float = 0.0
    moe: MoeShape | None = None
    dense_layers: int = 0
    dense_ffn: int = 0
    latent: Latent | None = None
    delta: DeltaShape | None = None

    @property
    def rotated(self) -> int:
        """Numbers of a head that the rotary embedding turns."""
        return int(self.head_dim * self.style.rotary_share) if self.latent is None else self.latent.rotated

    @property
    def turned(self) -> int:
        """Numbers that a head's query and key have beyond its value's."""
        return 0 if self.latent is None else self.latent.rotated

    @property
    def priced_only(self) -> tuple[str, ...]:
        """Features that the decoder here lacks, in words: a model with any is priced, and not trained."""
        has_sigmoid = self.moe is not None and self.moe.router == "sigmoid"
        parts = {
            "latent attention without a router of sigmoid scores": self.latent is not None and not has_sigmoid,
        }
        return tuple(words for words, has_it in parts.items() if has_it)

    @property
    def is_priced_only(self) -> bool:
        return bool(self.priced_only)

    def rule(self, layer: int) -> AttentionRule:
        """The rule of a layer's attention."""
        window = None if layer in self.full_layers else self.window
        return AttentionRule(window=window, soft_cap=self.style.soft_cap, positions=self.positions)

    def mixer(self, layer: int) -> AttentionRule | DeltaShape:
        """The rule of a layer's attention, or its linear attention."""
        return self.at(layer).delta or self.rule(layer)

    @property
    def embedding_scale(self) -> float:
        """Multiplies what the embedding gives."""
        return math.sqrt(self.width) if self.style.scales_embedding else self.style.embedding_scale

    @property
    def has_wide_qk_norm(self) -> bool:
        """Whether queries and keys are normalised over all heads together."""
        return self.qk_norm and self.style.wide_qk_norm

    @property
    def rules(self) -> tuple[AttentionRule, ...]:
        """The different rules among the layers, in their order."""
        layers = range(self.layers) if self.full_layers else (0,)
        return tuple(dict.fromkeys(map(self.rule, layers)))

    @property
    def has_blockwise_rule(self) -> bool:
        """Whether a layer's attention has a rule that only torch's operations have on a CPU."""
        return any(rule.is_blockwise for rule in self.rules)

    def at(self, layer: int) -> ModelShape:
        """A block's shape: those before the first with experts have their own feed-forward, and in a model with linear
        attention some have attention.
        """
        if self.delta is not None and layer in self.full_layers:
            return replace(self, delta=None, full_layers=()).at(layer)
        if layer >= self.dense_layers:
            return self
        return replace(self, moe=None, ffn=self.dense_ffn, dense_layers=0)


def balance_weight_of(coefficient: float, *, experts_per_token: int, layers: int) -> float:
    """Our balance weight for a ``router_aux_loss_coef`` of Hugging Face's published configurations.

    Theirs is coefficient · E · Σ_e F_e · P_e, where F_e is the number of choices of expert e for each token (the sum is
    k), averaged over all layers together: k at even load. Ours adds weight · E · Σ_e f_e · P_e of each layer, where f_e
    is a share of the choices: ``layers`` at even load. With F = k · f both losses are equal where layers route alike,
    if weight = coefficient · k / layers.
    """
    return coefficient * experts_per_token / layers


def balance_coefficient_of(weight: float, *, experts_per_token: int, layers: int) -> float:
    """The inverse, to 15 digits, so that a value that was read is written again."""
    return float(f"{weight * layers / experts_per_token:.15g}")


def dropless(experts: int, experts_per_token: int, balance_weight: float = 0.0, *, shared_experts: int = 0) -> MoeShape:
    """Experts that drop no token, with weights that sum to one."""
    return MoeShape(
        router="dropless", experts=experts, experts_per_token=experts_per_token, shared_experts=shared_experts,
        renormalise=True, capacity_factor=None, balance_weight=balance_weight, z_weight=0.0,
    )  # fmt: skip

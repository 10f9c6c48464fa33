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
from typing import Any, Literal

from superstep.plan.config import Positions, Router
from superstep.plan.model.attention_rule import AttentionRule, DeltaShape
from superstep.plan.model.rope import Llama3Rope, RopeScaling, YarnRope
from superstep.plan.model.style import GEMMA, GPT_OSS, LLAMA, OLMO, QWEN_NEXT, BlockStyle

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
    widths.
    """

    query_rank: int
    key_rank: int
    rotated: int = ROTATED


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


def _llama(layers: int, width: int, heads: int, ffn: int, **over: Any) -> ModelShape:  # noqa: ANN401
    base = ModelShape(
        family="llama", layers=layers, width=width, heads=heads, kv_heads=8, head_dim=width // heads, ffn=ffn,
        vocab=128256, tied=False, qk_norm=False, norm_eps=1e-5, rope_theta=500000.0, rope_scaling=None,
        max_tokens=8192,
    )  # fmt: skip
    return replace(base, **over)


def _gpt(layers: int, width: int, heads: int, ffn: int) -> ModelShape:
    """A published GPT in the decoder's terms: 51,200 ids, as padded there, and sequences of 2,048 tokens."""
    return _llama(layers, width, heads, ffn, kv_heads=heads, vocab=51200, rope_theta=10000.0, max_tokens=2048)


def _qwen3(layers: int, width: int, heads: int, ffn: int, **over: Any) -> ModelShape:  # noqa: ANN401
    base = ModelShape(
        family="qwen3", layers=layers, width=width, heads=heads, kv_heads=8, head_dim=128, ffn=ffn,
        vocab=151936, tied=False, qk_norm=True, norm_eps=1e-6, rope_theta=1000000.0, rope_scaling=None,
        max_tokens=40960,
    )  # fmt: skip
    return replace(base, **over)


def _qwen2(layers: int, width: int, heads: int, ffn: int, **over: Any) -> ModelShape:  # noqa: ANN401
    base = _llama(
        layers, width, heads, ffn, vocab=152064, norm_eps=1e-6, rope_theta=1000000.0, qkv_bias=True, max_tokens=131072
    )
    return replace(base, **over)


def _olmo(layers: int, width: int, heads: int, ffn: int, **over: Any) -> ModelShape:  # noqa: ANN401
    """OLMo 2's (2025) and OLMo 3's ``config.json`` files."""
    base = _llama(
        layers, width, heads, ffn, kv_heads=heads, vocab=100352, norm_eps=1e-6, qk_norm=True, max_tokens=4096,
        style=OLMO,
    )  # fmt: skip
    return replace(base, **over)


def _gemma(layers: int, width: int, heads: int, ffn: int, **over: Any) -> ModelShape:  # noqa: ANN401
    """Gemma 2's (2024) and Gemma 3's (2025) ``config.json`` files."""
    base = _qwen3(
        layers, width, heads, ffn, kv_heads=4, head_dim=256, vocab=256000, tied=True, qk_norm=False,
        rope_theta=10000.0, max_tokens=8192, window=4096, full_layers=tuple(range(1, layers, 2)), style=GEMMA,
    )  # fmt: skip
    return replace(base, **over)


def _qwen_next(layers: int, width: int, ffn: int, **over: Any) -> ModelShape:  # noqa: ANN401
    """Qwen3-Next's (2025) and Qwen3.5's (2026): linear attention in all layers but every fourth."""
    base = _qwen3(
        layers, width, 16, ffn, head_dim=256, rope_theta=10000000.0, max_tokens=262144, style=QWEN_NEXT,
        full_layers=tuple(range(3, layers, 4)),
        delta=DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    )  # fmt: skip
    return replace(base, **over)


_LONG = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=8192)
_LONG_SMALL = replace(_LONG, factor=32.0)
_OLMO_LONG = YarnRope(
    factor=8.0,
    original_tokens=8192,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=True,
    attention_factor=1.2079441541679836,
)


_GPT_OSS_LONG = YarnRope(
    factor=32.0,
    original_tokens=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    attention_factor=1.3465735902799727,
)


_DEEPSEEK_LONG = YarnRope(
    factor=40.0,
    original_tokens=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=True,
    attention_factor=1.0,
    score_scale=1.0,
)


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


def _make_published_moe(experts: int, experts_per_token: int, coefficient: float, *, layers: int) -> MoeShape:
    weight = balance_weight_of(coefficient, experts_per_token=experts_per_token, layers=layers)
    return dropless(experts, experts_per_token, weight)


def _gpt_oss(layers: int, experts: int) -> ModelShape:
    """gpt-oss's ``config.json`` files. Their coefficient of the router's loss, 0.9, is for a loss that transformers
    leaves out; this is its usual one.
    """
    moe = _make_published_moe(experts, 4, 0.001, layers=layers)
    return _llama(
        layers, 2880, 64, 2880, family="qwen3", head_dim=64, vocab=201088, rope_theta=150000.0,
        rope_scaling=_GPT_OSS_LONG, max_tokens=131072, qkv_bias=True, window=128,
        full_layers=tuple(range(1, layers, 2)), moe=moe, style=GPT_OSS,
    )  # fmt: skip


SHAPES: dict[str, ModelShape] = {
    "tiny": _llama(2, 64, 4, 160, kv_heads=2, vocab=512, tied=True, rope_theta=10000.0, max_tokens=1024),
    "demo": _llama(4, 128, 4, 352, kv_heads=2, vocab=2048, tied=True, rope_theta=10000.0, max_tokens=2048),
    "demo-moe": _llama(
        4,
        128,
        4,
        176,
        kv_heads=2,
        vocab=2048,
        tied=True,
        rope_theta=10000.0,
        max_tokens=2048,
        moe=dropless(8, 2, 0.01),
    ),
    "bench": _llama(8, 512, 8, 1376, vocab=4096, rope_theta=10000.0, max_tokens=2048),
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3.1-8b": _llama(32, 4096, 32, 14336, rope_scaling=_LONG, max_tokens=131072),
    "llama3.1-70b": _llama(80, 8192, 64, 28672, rope_scaling=_LONG, max_tokens=131072),
    "llama3.1-405b": _llama(126, 16384, 128, 53248, rope_scaling=_LONG, max_tokens=131072),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, tied=True, rope_scaling=_LONG_SMALL, max_tokens=131072),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, tied=True, rope_scaling=_LONG_SMALL, max_tokens=131072),
    "mistral-7b": _llama(32, 4096, 32, 14336, vocab=32000, rope_theta=10000.0, max_tokens=32768, window=4096),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 4864, kv_heads=2, vocab=151936, tied=True, max_tokens=32768),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 18944, kv_heads=4),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 768, kv_heads=4, moe=_make_published_moe(128, 8, 0.001, layers=48)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 1536, kv_heads=4, moe=_make_published_moe(128, 8, 0.001, layers=94)),
    "olmo2-7b": _olmo(32, 4096, 32, 11008),
    "olmo3-7b": _olmo(
        32,
        4096,
        32,
        11008,
        vocab=100278,
        max_tokens=65536,
        window=4096,
        full_layers=tuple(range(3, 32, 4)),
        rope_scaling=_OLMO_LONG,
        style=replace(OLMO, local_theta=500000.0),
    ),
    "gemma2-2b": _gemma(26, 2304, 8, 9216, style=replace(GEMMA, soft_cap=50.0, logit_cap=30.0)),
    "gemma3-1b": _gemma(
        26,
        1152,
        4,
        6912,
        kv_heads=1,
        vocab=262144,
        qk_norm=True,
        rope_theta=1000000.0,
        max_tokens=32768,
        window=512,
        full_layers=tuple(range(5, 26, 6)),
        style=replace(GEMMA, local_theta=10000.0),
    ),
    "qwen3.5-9b": _qwen_next(32, 4096, 12288, kv_heads=4, vocab=248320),
    "qwen3-next-80b-a3b": _qwen_next(
        48,
        2048,
        512,
        kv_heads=2,
        vocab=151936,
        style=replace(QWEN_NEXT, shared_gate=True),
        moe=replace(_make_published_moe(512, 10, 0.001, layers=48), shared_experts=1),
        delta=DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, is_grouped=True),
    ),
    "deepseek-v3": _llama(
        61,
        7168,
        128,
        2048,
        family="qwen3",
        kv_heads=128,
        head_dim=128,
        vocab=129280,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=_DEEPSEEK_LONG,
        max_tokens=163840,
        moe=replace(dropless(256, 8, shared_experts=1), router="sigmoid", groups=8, groups_per_token=4, scale=2.5),
        dense_layers=3,
        dense_ffn=18432,
        latent=Latent(query_rank=1536, key_rank=512),
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt3-175b": _gpt(96, 12288, 96, 32768),
    "1t": _gpt(128, 25600, 160, 68352),
    "mixtral-8x7b": _llama(
        32,
        4096,
        32,
        14336,
        vocab=32000,
        rope_theta=1000000.0,
        max_tokens=32768,
        moe=_make_published_moe(8, 2, 0.02, layers=32),
    ),
}

"""Sizes of decoders that can be trained, by name, from the published ``config.json`` files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.rope import GPT_OSS_YARN, Llama3Rope, YarnRope
from superstep.plan.model.shape import Latent, ModelShape, MoeShape, balance_weight_of, dropless
from superstep.plan.model.style import GEMMA, GPT_OSS, OLMO, QWEN_NEXT


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


_DEEPSEEK_LONG = YarnRope(
    factor=40.0,
    original_tokens=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=True,
    attention_factor=1.0,
    score_scale=1.0,
)


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
        rope_scaling=GPT_OSS_YARN, max_tokens=131072, qkv_bias=True, window=128,
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
    "kimi-k2": _llama(
        61,
        7168,
        64,
        2048,
        family="qwen3",
        kv_heads=64,
        head_dim=128,
        vocab=163840,
        norm_eps=1e-6,
        rope_theta=50000.0,
        rope_scaling=replace(_DEEPSEEK_LONG, factor=32.0, beta_fast=1.0),
        max_tokens=131072,
        moe=replace(dropless(384, 8, shared_experts=1), router="sigmoid", scale=2.827),
        dense_layers=1,
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

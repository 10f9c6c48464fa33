"""Models with alternating sliding and full layers, by name and by ``config.json``: priced, but cannot be trained yet.

The numbers are those of ``config.json`` of ``openai/gpt-oss-120b`` and ``gpt-oss-20b`` (OpenAI 2025, table 1), without
what no price depends on: a learned sink beside each head's scores, biases, clamped gates.
"""

from __future__ import annotations

from pathlib import Path

from superstep.plan.model.hf_config import plain, read_json, sliding_layers
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.shape import ModelShape, dropless

KINDS = ("gpt_oss",)
DEFAULTS = {
    "head_dim": 64,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 4,
}


def _gpt_oss(layers: int, experts: int) -> ModelShape:
    return ModelShape(
        family="llama", layers=layers, width=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880, vocab=201088,
        tied=False, qk_norm=False, norm_eps=1e-5, rope_theta=150000.0, rope_scaling=None, max_tokens=131072,
        window=128, full_layers=tuple(range(1, layers, 2)), sinks=True, moe=dropless(experts, 4),
    )  # fmt: skip


PRICED: dict[str, ModelShape] = {"gpt-oss-120b": _gpt_oss(36, 128), "gpt-oss-20b": _gpt_oss(24, 32)}


def from_alternating_config(path: Path) -> ModelShape:
    """The shape in such a model's ``config.json``, for pricing. Raises ConfigError where a number is missing, or a
    layer attends in another way.
    """
    keys = JsonKeys(read_json(path), f"{path}: ", DEFAULTS)
    layers = keys.layers()
    slides = sliding_layers(keys, layers)
    if all(slides):
        raise keys.refusal("layer_types", "lets all layers slide; at least one must be 'full_attention'")
    return ModelShape(
        **plain(keys),
        layers=layers,
        heads=keys.whole("num_attention_heads"),
        kv_heads=keys.whole("num_key_value_heads"),
        head_dim=keys.whole("head_dim"),
        ffn=keys.whole("intermediate_size"),
        window=keys.whole("sliding_window"),
        full_layers=tuple(layer for layer, each in enumerate(slides) if not each),
        sinks=True,
        moe=dropless(keys.whole("num_local_experts"), keys.whole("num_experts_per_tok")),
    )

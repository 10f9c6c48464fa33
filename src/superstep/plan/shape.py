"""ModelShape: the numbers of a decoder, and the catalogue of named sizes.

Llama 3 shapes are those of the published ``config.json`` files (Dubey 2024, table 3); Qwen3 shapes are those
of the Qwen3 report (Yang 2025, tables 1 and 2) and its published ``config.json`` files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from superstep.errors import ConfigError, did_you_mean
from superstep.plan.config import ModelConfig

Family = Literal["llama", "qwen3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary wavelengths for long context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Llama- or Qwen3-style decoder, whole.

    Attributes:
        width: the residual stream (D); heads · head_dim may differ from it.
        ffn: the inner width of the gated feed-forward (F).
        max_tokens: the longest sequence the published model was trained for.
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


def _llama(layers: int, width: int, heads: int, ffn: int, **over: Any) -> ModelShape:  # noqa: ANN401
    base = ModelShape(
        family="llama", layers=layers, width=width, heads=heads, kv_heads=8, head_dim=width // heads, ffn=ffn,
        vocab=128256, tied=False, qk_norm=False, norm_eps=1e-5, rope_theta=500000.0, rope_scaling=None,
        max_tokens=8192,
    )  # fmt: skip
    return replace(base, **over)


def _qwen3(layers: int, width: int, heads: int, ffn: int, **over: Any) -> ModelShape:  # noqa: ANN401
    base = ModelShape(
        family="qwen3", layers=layers, width=width, heads=heads, kv_heads=8, head_dim=128, ffn=ffn,
        vocab=151936, tied=False, qk_norm=True, norm_eps=1e-6, rope_theta=1000000.0, rope_scaling=None,
        max_tokens=40960,
    )  # fmt: skip
    return replace(base, **over)


_LONG = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=8192)
_LONG_SMALL = replace(_LONG, factor=32.0)

SHAPES: dict[str, ModelShape] = {
    "tiny": _llama(2, 64, 4, 160, kv_heads=2, vocab=512, tied=True, rope_theta=10000.0, max_tokens=1024),
    "demo": _llama(4, 128, 4, 352, kv_heads=2, vocab=2048, tied=True, rope_theta=10000.0, max_tokens=2048),
    "bench": _llama(8, 512, 8, 1376, vocab=4096, rope_theta=10000.0, max_tokens=2048),
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3.1-8b": _llama(32, 4096, 32, 14336, rope_scaling=_LONG, max_tokens=131072),
    "llama3.1-70b": _llama(80, 8192, 64, 28672, rope_scaling=_LONG, max_tokens=131072),
    "llama3.1-405b": _llama(126, 16384, 128, 53248, rope_scaling=_LONG, max_tokens=131072),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, tied=True, rope_scaling=_LONG_SMALL, max_tokens=131072),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, tied=True, rope_scaling=_LONG_SMALL, max_tokens=131072),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
}


def shape_of(config: ModelConfig) -> ModelShape:
    """The whole shape that a ``[model]`` section means.

    Raises:
        ConfigError: an unknown name, an unreadable or foreign config.json, or numbers that do not fit.
    """
    if config.name in SHAPES:
        base = SHAPES[config.name]
    elif config.name.endswith(".json"):
        base = from_hf_config(Path(config.name))
    else:
        raise ConfigError(
            f"model.name = '{config.name}' is neither a named size nor the path of a config.json"
            + did_you_mean(config.name, SHAPES)
        )
    fields = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "qk_norm")
    over = {name: getattr(config, name) for name in fields if getattr(config, name) is not None}
    if "head_dim" not in over and ("width" in over or "heads" in over) and base.family == "llama":
        width, heads = over.get("width", base.width), over.get("heads", base.heads)
        if heads < 1 or width % heads:
            raise ConfigError(
                f"model.width = {width} does not split into model.heads = {heads} heads; "
                "set model.head_dim, or heads to a divisor of the width."
            )
        over["head_dim"] = width // heads
    if "heads" in over and "kv_heads" not in over and over["heads"] % base.kv_heads:
        over["kv_heads"] = over["heads"]
    shape = replace(base, **over)
    _check(shape)
    return shape


def _check(shape: ModelShape) -> None:
    for name in ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
        if getattr(shape, name) < 1:
            raise ConfigError(f"model.{name} = {getattr(shape, name)} must be at least 1.")
    if shape.heads % shape.kv_heads:
        choices = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
        raise ConfigError(
            f"model.kv_heads = {shape.kv_heads} must divide model.heads = {shape.heads}; "
            f"set model.kv_heads to one of {choices}."
        )
    if shape.head_dim % 2:
        raise ConfigError(
            f"model.head_dim = {shape.head_dim} must be even: rotary embedding turns pairs; "
            f"set model.head_dim to {shape.head_dim + 1}."
        )


def from_hf_config(path: Path) -> ModelShape:
    """The shape in a Hugging Face ``config.json`` of the Llama or Qwen3 family.

    Raises:
        ConfigError: the file cannot be read, is another family, or asks for what the decoder does not have.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model.name = '{path}' cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"model.name = '{path}' is not JSON: {error}.") from error
    family = raw.get("model_type") if isinstance(raw, dict) else None
    if family not in ("llama", "qwen3"):
        raise ConfigError(f"{path}: model_type = {family!r} is not supported; it must be 'llama' or 'qwen3'.")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(key):
            raise ConfigError(f"{path}: {key} = true is not supported; this decoder has no such part.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act = {raw['hidden_act']!r} is not supported; it must be 'silu'.")
    try:
        return _read_hf(raw, family)
    except KeyError as error:
        raise ConfigError(f"{path}: the key {error} is missing.") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: a key has a value of the wrong type: {error}.") from error


def _read_hf(raw: dict[str, Any], family: Family) -> ModelShape:
    # transformers 5 moved rope_theta into rope_parameters; older files have it beside rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(f"rope_type = {kind!r} is not supported; it must be 'default' or 'llama3'.")
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_tokens=int(rope["original_max_position_embeddings"]),
        )
    heads = int(raw["num_attention_heads"])
    shape = ModelShape(
        family=family,
        layers=int(raw["num_hidden_layers"]),
        width=int(raw["hidden_size"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        ffn=int(raw["intermediate_size"]),
        vocab=int(raw["vocab_size"]),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta", 10000.0)),
        rope_scaling=scaling,
        max_tokens=int(raw["max_position_embeddings"]),
    )
    _check(shape)
    return shape


def to_hf_config(shape: ModelShape) -> dict[str, Any]:
    """The ``config.json`` that Hugging Face's loaders read back as this shape."""
    # A Llama with QK-norm is a Qwen3 to every other loader.
    qwen = shape.qk_norm
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling:
        rope = {
            "rope_type": "llama3",
            "rope_theta": shape.rope_theta,
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low_freq_factor,
            "high_freq_factor": shape.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": shape.rope_scaling.original_tokens,
        }
    return {
        "architectures": ["Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": "qwen3" if qwen else "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope,
        "rope_scaling": rope if shape.rope_scaling else None,
        "max_position_embeddings": shape.max_tokens,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }

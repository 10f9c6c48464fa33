"""A Hugging Face ``config.json`` as a shape, and a shape as a ``config.json``.

    model_type       the block's feed-forward       queries and keys
    llama            one                            as they are
    qwen3            one                            normalised per head
    mixtral          experts, dropless              as they are
    qwen3_moe        experts, dropless              normalised per head
    superstep_moe    experts, any router            either: no other loader has them

In a mixture every block has experts: a file with dense blocks in between is refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from superstep.errors import ConfigError
from superstep.plan.model.shape import (
    ModelShape,
    MoeShape,
    RopeScaling,
    balance_coefficient_of,
    balance_weight_of,
    check_shape,
)

ModelType = Literal["llama", "qwen3", "mixtral", "qwen3_moe", "superstep_moe"]


def model_type(shape: ModelShape) -> ModelType:
    """The kind of model that other loaders take a shape for."""
    # A Llama with QK-norm is a Qwen3 to every other loader.
    if shape.moe is None:
        return "qwen3" if shape.qk_norm else "llama"
    is_plain = shape.moe.router == "dropless" and shape.moe.shared_experts == 0
    if is_plain and shape.qk_norm:
        return "qwen3_moe"
    return "mixtral" if is_plain and shape.moe.renormalise else "superstep_moe"


def from_hf_config(path: Path) -> ModelShape:
    """The shape in a ``config.json`` of one of the kinds above.

    Raises:
        ConfigError: the file cannot be read, is of another kind, or asks for what the decoder does not have.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model.name = '{path}' cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"model.name = '{path}' is not JSON: {error}.") from error
    told = raw.get("model_type") if isinstance(raw, dict) else None
    kinds: tuple[ModelType, ...] = get_args(ModelType)
    if told not in kinds:
        known = ", ".join(repr(kind) for kind in kinds)
        raise ConfigError(f"{path}: model_type = {told!r} is not supported; it must be one of {known}.")
    kind = kinds[kinds.index(told)]
    for key, value in _only(kind).items():
        if (raw.get(key) or value) != value:
            found, wanted = json.dumps(raw[key]), json.dumps(value)
            raise ConfigError(f"{path}: {key} = {found} is not supported; it must be {wanted}.")
    try:
        return _read(raw, kind)
    except KeyError as error:
        raise ConfigError(f"{path}: the key {error} is missing.") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: a key has a value of the wrong type: {error}.") from error


def _only(kind: ModelType) -> dict[str, Any]:
    """Keys that may say one thing alone; left out or null, they say it."""
    everywhere = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
    match kind:
        case "mixtral":
            # Mixtral slides wherever a window is named; the others name one that use_sliding_window leaves unused.
            return everywhere | {"sliding_window": None, "router_jitter_noise": 0.0}
        case "qwen3_moe":
            return everywhere | {"decoder_sparse_step": 1, "mlp_only_layers": []}
        case _:
            return everywhere


def _read(raw: dict[str, Any], kind: ModelType) -> ModelShape:
    # transformers 5 moved rope_theta into rope_parameters; older files have it beside rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    heads = int(raw["num_attention_heads"])
    qk_norm = bool(raw["qk_norm"]) if kind == "superstep_moe" else kind in ("qwen3", "qwen3_moe")
    shape = ModelShape(
        family="qwen3" if qk_norm else "llama",
        layers=int(raw["num_hidden_layers"]),
        width=int(raw["hidden_size"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        # Qwen3-MoE's intermediate_size is the width of dense blocks, of which it has none.
        ffn=int(raw["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"]),
        vocab=int(raw["vocab_size"]),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=qk_norm,
        norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta", 10000.0)),
        rope_scaling=_read_scaling(rope),
        max_tokens=int(raw["max_position_embeddings"]),
        moe=_read_moe(raw, kind),
    )
    check_shape(shape)
    return shape


def _read_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(f"rope_type = {kind!r} is not supported; it must be 'default' or 'llama3'.")
    if kind == "default":
        return None
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_tokens=int(rope["original_max_position_embeddings"]),
    )


def _read_moe(raw: dict[str, Any], kind: ModelType) -> MoeShape | None:
    if kind == "superstep_moe":
        return MoeShape(**raw["moe"])
    if kind not in ("mixtral", "qwen3_moe"):
        return None
    k = int(raw["num_experts_per_tok"])
    coefficient = float(raw.get("router_aux_loss_coef", 0.001))
    return MoeShape(
        router="dropless",
        # transformers 5 writes Qwen3-MoE's num_experts under Mixtral's key.
        experts=int(raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]),
        experts_per_token=k,
        shared_experts=0,
        renormalise=kind == "mixtral" or bool(raw.get("norm_topk_prob", False)),
        capacity_factor=None,
        balance_weight=balance_weight_of(coefficient, experts_per_token=k, layers=int(raw["num_hidden_layers"])),
        z_weight=float(raw.get("router_z_loss_coef", 0.0)),
    )


_ARCHITECTURES: dict[ModelType, str] = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "superstep_moe": "SuperstepMoe",
}


def to_hf_config(shape: ModelShape) -> dict[str, Any]:
    """The ``config.json`` that Hugging Face's loaders, or at least ``from_hf_config``, read back as this shape."""
    kind = model_type(shape)
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
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
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
        **_write_moe(shape, kind),
    }


def _write_moe(shape: ModelShape, kind: ModelType) -> dict[str, Any]:
    if shape.moe is None:
        return {}
    if kind == "superstep_moe":
        return {"qk_norm": shape.qk_norm, "moe": asdict(shape.moe)}
    k, weight = shape.moe.experts_per_token, shape.moe.balance_weight
    shared = {
        "num_experts_per_tok": k,
        "router_aux_loss_coef": balance_coefficient_of(weight, experts_per_token=k, layers=shape.layers),
        "router_z_loss_coef": shape.moe.z_weight,
        "sliding_window": None,
    }
    if kind == "mixtral":
        return {**shared, "num_local_experts": shape.moe.experts}
    return {
        **shared,
        "num_experts": shape.moe.experts,
        "moe_intermediate_size": shape.ffn,
        "norm_topk_prob": shape.moe.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }

"""A Hugging Face ``config.json`` as a shape, and a shape as a ``config.json``.

    model_type       the block's feed-forward       queries, keys and values
    llama            one                            plain
    mistral          one                            plain; attention may slide
    qwen2            one                            with biases
    qwen3            one                            normalised per head
    mixtral          experts, dropless              plain
    qwen3_moe        experts, dropless              normalised per head
    superstep_moe    experts, any router            either: no other loader has them
    superstep_bias   one                            either, with position biases: no other loader has them
    others           ``plan.model.hf_styles`` has a row for each

In a mixture every block has experts: a file with dense blocks in between is refused. So is one with a key that is
neither honoured nor known to change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from superstep.errors import ConfigError
from superstep.plan.model.check_shape import check_shape
from superstep.plan.model.hf_delta import read_delta, read_full_layers, read_rotary_share, write_delta
from superstep.plan.model.hf_families import (
    ARCHITECTURES,
    DEFAULTS,
    HARMLESS,
    HARMLESS_IN,
    MORE_THAN_TEXT,
    OTHER_LAYERS,
    PRICED_TYPE,
    ModelType,
    only,
)
from superstep.plan.model.hf_latent import read_latent_shape, write_latent
from superstep.plan.model.hf_rope import has_rope, read_layer_ropes, read_rope, write_rope
from superstep.plan.model.hf_styles import STYLES, StyleRow
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.shape import (
    Family,
    ModelShape,
    MoeShape,
    balance_coefficient_of,
    balance_weight_of,
)
from superstep.plan.model.style import LLAMA

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Special tokens matter for generation only: transformers gives the embedding of padding no gradient, and our text is
never padded with a token.
"""

OURS: tuple[ModelType, ...] = ("superstep_moe", "superstep_bias")
"""Types of models that no other loader has."""


def model_type(shape: ModelShape) -> ModelType:
    """The model type by which other loaders read a shape."""
    if shape.latent is not None:
        return "deepseek_v3"
    if shape.style != LLAMA:
        kinds = [kind for kind, row in STYLES.items() if row.has(shape)]
        if not kinds:
            raise ConfigError(
                f"model.qk_norm = {str(shape.qk_norm).lower()}: no model family has such blocks; leave it out."
            )
        return kinds[0]
    if shape.positions != "rope":
        return "superstep_bias"
    # A Llama with QK-norm is a Qwen3 to every other loader, one with a window a Mistral.
    if shape.moe is None:
        if shape.qkv_bias:
            return "qwen2"
        if shape.qk_norm:
            return "qwen3"
        return "llama" if shape.window is None else "mistral"
    is_plain = shape.moe.router == "dropless" and shape.moe.shared_experts == 0
    if is_plain and shape.qk_norm:
        return "qwen3_moe"
    return "mixtral" if is_plain and shape.moe.renormalise else "superstep_moe"


def from_hf_config(path: Path) -> ModelShape:
    """The shape in a ``config.json`` of one of the types above. Raises ConfigError where the file cannot be read, has
    another type, or needs what the decoder does not have.
    """
    raw = read_json(path)
    model_type = raw.get("model_type")
    if model_type == "kimi_k2":  # DeepSeek-V3 under another name, with Kimi's own class for other loaders
        model_type, raw = "deepseek_v3", {key: value for key, value in raw.items() if key != "auto_map"}
    kinds: tuple[ModelType, ...] = get_args(ModelType)
    if model_type not in kinds:
        known = ", ".join(repr(kind) for kind in kinds)
        if str(model_type) in MORE_THAN_TEXT:
            raise ConfigError(
                f"{path}: model_type = '{model_type}' reads {MORE_THAN_TEXT[str(model_type)]}: superstep train and "
                "prove take it, with the samples of data.source, and superstep tune sft, with conversations; other "
                "commands take a decoder of text."
            )
        other = OTHER_LAYERS.get(str(model_type))
        why = f"has {other}, which Superstep can neither train nor price" if other else "is not supported"
        raise ConfigError(
            f"{path}: model_type = {model_type!r} {why}; it must be one of {known}, or one that superstep plan alone "
            f"takes: '{PRICED_TYPE}'."
        )
    kind = kinds[kinds.index(model_type)]
    if _is_readable(raw.get("quantization_config"), kind):
        raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    return read_shape(raw, kind, f"{path}: ")


def read_shape(raw: Mapping[str, Any], kind: ModelType, place: str) -> ModelShape:
    """The shape in an object of a type's keys; ``place`` begins its errors. Raises as ``from_hf_config``."""
    keys = JsonKeys(raw, place, DEFAULTS[kind])
    keys.require(only(kind))
    shape = (read_latent_shape if kind == "deepseek_v3" else partial(_read, kind=kind))(keys, place=place)
    keys.require_read({*HARMLESS, *HARMLESS_IN.get(kind, ())})
    check_shape(shape)
    return shape


def _is_readable(quantization: object, kind: ModelType) -> bool:
    """Whether ``model.files`` reads such weights: gpt-oss's MXFP4, or DeepSeek's FP8 with a scale for each block."""
    if not isinstance(quantization, dict):
        return False
    if quantization.get("quant_method") == "fp8":
        return kind == "deepseek_v3" and quantization.get("weight_block_size") == [128, 128]
    return kind == "gpt_oss" and quantization.get("quant_method") == "mxfp4"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ConfigError where the file cannot be read, or holds something else."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model.name = '{path}' cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.name = '{path}' is not JSON that can be read: {error}.") from error
    return raw if isinstance(raw, dict) else {}


def _read(keys: JsonKeys, kind: ModelType, place: str) -> ModelShape:
    heads, width = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    row = STYLES.get(kind)
    qk_norm = keys.flag("qk_norm") if kind in OURS else kind in ("qwen3", "qwen3_moe")
    qk_norm = row.qk_norm if row else qk_norm
    head_dim = width // heads if keys.get("head_dim") is None else keys.whole("head_dim")
    max_tokens = keys.whole("max_position_embeddings")
    window, full_layers = _read_window(keys, kind)
    has_delta = row is not None and row.has_delta
    share = read_rotary_share(keys) if has_delta else 1.0
    theta, scaling, local_theta = (
        read_layer_ropes(keys, place, max_tokens)
        if row and row.has_local_rope
        else (*read_rope(keys, place, max_tokens, share), None)
    )
    if row is not None and row.rope_scaling is not None and not has_rope(keys):
        scaling = row.rope_scaling
    style = row.read(keys, head_dim, local_theta) if row else LLAMA
    for key in TOKEN_IDS:
        keys.require_ids(key)
    return ModelShape(
        family=_head_rule(kind, qk_norm=qk_norm),
        layers=keys.layers(),
        width=width,
        heads=heads,
        kv_heads=heads if keys.get("num_key_value_heads") is None else keys.whole("num_key_value_heads"),
        head_dim=head_dim,
        # The intermediate_size of these is the width of dense blocks, of which there are none.
        ffn=keys.whole("moe_intermediate_size" if kind in ("qwen3_moe", "qwen3_next") else "intermediate_size"),
        vocab=keys.whole("vocab_size"),
        tied=keys.flag("tie_word_embeddings"),
        qk_norm=qk_norm,
        qkv_bias=row.qkv_bias if row else kind == "qwen2",
        window=window,
        full_layers=read_full_layers(keys) if has_delta else full_layers,
        style=replace(style, rotary_share=share) if has_delta else style,
        norm_eps=keys.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_tokens=max_tokens,
        init_std=keys.positive("initializer_range"),
        **_read_positions(keys, kind),
        moe=_read_moe(keys, kind),
        delta=read_delta(keys, kind) if has_delta else None,
    )


def _read_positions(keys: JsonKeys, kind: ModelType) -> dict[str, Any]:
    if kind != "superstep_bias":
        return {}
    return {"positions": keys.get("positions"), "max_distance": keys.whole("max_distance")}


def _write_positions(shape: ModelShape, kind: ModelType) -> dict[str, Any]:
    if kind != "superstep_bias":
        return {}
    return {"qk_norm": shape.qk_norm, "positions": shape.positions, "max_distance": shape.max_distance}


def _head_rule(kind: ModelType, *, qk_norm: bool) -> Family:
    """Whose rule gives ``head_dim`` if it is left out: Llama's, which is width / heads, or Qwen3's, a fixed number."""
    if kind in STYLES:
        return "llama" if DEFAULTS[kind]["head_dim"] is None else "qwen3"
    return "qwen3" if qk_norm else "llama"


def _read_window(keys: JsonKeys, kind: ModelType) -> tuple[int | None, tuple[int, ...]]:
    """The window of a model's layers, in tokens, or None; and the numbers of the layers without it."""
    row = STYLES.get(kind)
    if row is not None and row.full_every is not None:
        return _read_pattern(keys, row, row.full_every)
    if kind == "llama" or row is not None:
        return None, ()
    window = None if keys.get("sliding_window") is None else keys.whole("sliding_window")
    if kind in ("mistral", "mixtral", *OURS):
        return window, ()
    window = window if keys.flag("use_sliding_window") else None
    if kind == "qwen3_moe":
        return window, ()
    layers, first = keys.layers(), keys.whole("max_window_layers", least=0)
    slides = [window is not None and layer >= first for layer in range(layers)]
    if keys.get("layer_types") is not None:
        slides = sliding_layers(keys, layers)
    if any(slides) and window is None:
        raise keys.refusal(
            "layer_types", "gives layers a sliding window, but the window is off; set use_sliding_window to true"
        )
    full = tuple(layer for layer, each in enumerate(slides) if not each)
    return (window, full) if any(slides) else (None, ())


def _read_pattern(keys: JsonKeys, row: StyleRow, every: int) -> tuple[int | None, tuple[int, ...]]:
    """The same for a family in which most layers have a window: without ``layer_types``, all but every ``every``-th."""
    layers = keys.layers()
    if "sliding_window_pattern" in keys:
        every = keys.whole("sliding_window_pattern")
    slides = [bool((layer + 1) % every) for layer in range(layers)]
    if keys.get("layer_types") is not None:
        slides = sliding_layers(keys, layers)
    if keys.get("sliding_window") is None and not row.has_local_rope:
        return None, ()
    window = keys.whole("sliding_window")
    full = tuple(layer for layer, each in enumerate(slides) if not each)
    return (window, full) if any(slides) else (None, ())


def plain(keys: JsonKeys) -> dict[str, Any]:
    """``ModelShape`` fields that families which are only priced have in common. Scaling of angles has no price."""
    return {
        "family": "llama",
        "width": keys.whole("hidden_size"),
        "vocab": keys.whole("vocab_size"),
        "tied": keys.flag("tie_word_embeddings"),
        "qk_norm": False,
        "norm_eps": keys.number("rms_norm_eps"),
        "rope_theta": keys.positive("rope_theta"),
        "rope_scaling": None,
        "max_tokens": keys.whole("max_position_embeddings"),
    }


def sliding_layers(keys: JsonKeys, layers: int) -> list[bool]:
    """Whether each layer's attention slides, from ``layer_types``. Raises ConfigError where a layer is missing or of
    another type.
    """
    types = keys.get("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        raise keys.refusal("layer_types", f"must be a list of num_hidden_layers = {layers} entries")
    slides = [each == "sliding_attention" for each in types]
    if [f"{'sliding' if each else 'full'}_attention" for each in slides] != types:
        raise keys.refusal("layer_types", "is not supported; each must be 'full_attention' or 'sliding_attention'")
    return slides


def _read_moe(keys: JsonKeys, kind: ModelType) -> MoeShape | None:
    if kind == "superstep_moe":
        try:
            return MoeShape(**keys.get("moe"))
        except TypeError as error:
            raise keys.refusal("moe", "does not name the numbers of a mixture") from error
    if kind not in ("mixtral", "qwen3_moe", "qwen3_next", "gpt_oss"):
        return None
    # transformers 5 writes Qwen3-MoE's num_experts under Mixtral's key, and reads either.
    name = "num_experts" if "num_experts" in keys else "num_local_experts"
    k = keys.whole("num_experts_per_tok")
    keys.require({"num_local_experts": (keys.get(name),)})
    if kind == "gpt_oss":  # OpenAI's files have it under both names
        keys.require({"experts_per_token": (k,)})
    layers = keys.layers()
    return MoeShape(
        router="dropless",
        experts=keys.whole(name),
        experts_per_token=k,
        shared_experts=_read_shared(keys) if kind == "qwen3_next" else 0,
        renormalise=kind in ("mixtral", "gpt_oss") or keys.flag("norm_topk_prob"),
        capacity_factor=None,
        balance_weight=balance_weight_of(keys.number("router_aux_loss_coef"), experts_per_token=k, layers=layers),
        z_weight=keys.number("router_z_loss_coef"),
    )


def _read_shared(keys: JsonKeys) -> int:
    """Shared experts side by side, as wide as one wide expert."""
    wide, each = keys.whole("shared_expert_intermediate_size"), keys.whole("moe_intermediate_size")
    if wide % each:
        raise keys.refusal("shared_expert_intermediate_size", f"must be a multiple of moe_intermediate_size = {each}")
    return wide // each


def to_hf_config(shape: ModelShape) -> dict[str, Any]:
    """The ``config.json`` that Hugging Face's loaders, or at least ``from_hf_config``, read back as this shape."""
    kind = model_type(shape)
    return {
        "architectures": [ARCHITECTURES[kind]],
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
        **write_rope(shape.rope_theta, shape.rope_scaling, shape.style.local_theta, shape.style.rotary_share),
        "max_position_embeddings": shape.max_tokens,
        "initializer_range": shape.init_std,
        **(STYLES[kind].write(shape) if kind in STYLES else {"hidden_act": "silu"}),
        "attention_bias": shape.qkv_bias,
        "mlp_bias": False,
        "torch_dtype": "float32",
        # Left out they would be some of a family's own vocabulary; who knows the tokenizer fills them in.
        **dict.fromkeys(TOKEN_IDS),
        **_write_window(shape, kind),
        **_write_positions(shape, kind),
        **_write_moe(shape, kind),
        **write_delta(shape),
        **write_latent(shape),
    }


_LAYER_TYPES = {True: "sliding_attention", False: "full_attention"}


def _write_window(shape: ModelShape, kind: ModelType) -> dict[str, Any]:
    match kind:
        case "mistral" | "mixtral" | "superstep_moe" | "superstep_bias":
            return {"sliding_window": shape.window}
        case "qwen2" | "qwen3" | "qwen3_moe":
            window = {"use_sliding_window": shape.window is not None, "sliding_window": shape.window}
            if kind == "qwen3_moe":
                return window
            slides = [shape.rule(layer).window is not None for layer in range(shape.layers)]
            types = {"layer_types": [_LAYER_TYPES[each] for each in slides]} if shape.full_layers else {}
            return {**window, "max_window_layers": 0 if shape.window else shape.layers, **types}
        case _:  # without windows, or with a row that writes them
            return {}


def _write_moe(shape: ModelShape, kind: ModelType) -> dict[str, Any]:
    if shape.moe is None or kind == "deepseek_v3":
        return {}
    if kind == "superstep_moe":
        return {"qk_norm": shape.qk_norm, "moe": asdict(shape.moe)}
    k, weight = shape.moe.experts_per_token, shape.moe.balance_weight
    shared = {
        "num_experts_per_tok": k,
        "router_aux_loss_coef": balance_coefficient_of(weight, experts_per_token=k, layers=shape.layers),
        "router_z_loss_coef": shape.moe.z_weight,
    }
    if kind in ("mixtral", "gpt_oss"):
        return {**shared, "num_local_experts": shape.moe.experts}
    return {
        **shared,
        **({"shared_expert_intermediate_size": shape.moe.shared_experts * shape.ffn} if kind == "qwen3_next" else {}),
        "num_experts": shape.moe.experts,
        "moe_intermediate_size": shape.ffn,
        "norm_topk_prob": shape.moe.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }

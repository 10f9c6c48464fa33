"""Linear attention in a Hugging Face ``config.json``, and back: which layers have it, and its heads."""

from __future__ import annotations

from typing import Any

from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.hf_families import ModelType
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.shape import ModelShape

_TYPES = {True: "full_attention", False: "linear_attention"}
_SHARE = "partial_rotary_factor"
_PLACES = ("rope_parameters", "rope_scaling")


def read_delta(keys: JsonKeys, kind: ModelType) -> DeltaShape:
    """The heads of linear attention."""
    return DeltaShape(
        key_heads=keys.whole("linear_num_key_heads"),
        value_heads=keys.whole("linear_num_value_heads"),
        key_dim=keys.whole("linear_key_head_dim"),
        value_dim=keys.whole("linear_value_head_dim"),
        taps=keys.whole("linear_conv_kernel_dim"),
        is_grouped=kind == "qwen3_next",
    )


def read_full_layers(keys: JsonKeys) -> tuple[int, ...]:
    """The numbers of the layers with attention: those of ``layer_types``, or every ``full_attention_interval``-th.

    Raises ConfigError where a layer is missing or of another type.
    """
    layers, every = keys.layers(), keys.whole("full_attention_interval")
    types = keys.get("layer_types")
    if types is None:
        return tuple(range(every - 1, layers, every))
    if not isinstance(types, list) or len(types) != layers:
        raise keys.refusal("layer_types", f"must be a list of num_hidden_layers = {layers} entries")
    if not set(types) <= set(_TYPES.values()):
        raise keys.refusal("layer_types", f"is not supported; each must be {' or '.join(map(repr, _TYPES.values()))}")
    return tuple(layer for layer, each in enumerate(types) if each == _TYPES[True])


def read_rotary_share(keys: JsonKeys) -> float:
    """The share of a head's numbers that is rotated. Raises ConfigError for two different ones."""
    share = keys.positive(_SHARE)
    for place in _PLACES:
        raw = keys.get(place)
        if isinstance(raw, dict) and _SHARE in raw:
            inner = JsonKeys(raw, f"{place}.", {}).positive(_SHARE)
            if _SHARE in keys and inner != share:
                raise keys.refusal(_SHARE, f"contradicts {place}.{_SHARE} = {inner:g}; keep the right one")
            share = inner
    return share


def write_delta(shape: ModelShape) -> dict[str, Any]:
    """The keys that ``read_delta`` and ``read_full_layers`` read."""
    if shape.delta is None:
        return {}
    return {
        "linear_num_key_heads": shape.delta.key_heads,
        "linear_num_value_heads": shape.delta.value_heads,
        "linear_key_head_dim": shape.delta.key_dim,
        "linear_value_head_dim": shape.delta.value_dim,
        "linear_conv_kernel_dim": shape.delta.taps,
        "layer_types": [_TYPES[layer in shape.full_layers] for layer in range(shape.layers)],
    }

"""The rotary embedding in a Hugging Face ``config.json``, and back.

transformers 5 has one object, ``rope_parameters``, with theta inside; older files have ``rope_scaling`` for the scaling
and ``rope_theta`` beside it. A file with both must say the same in both.
"""

from __future__ import annotations

import math
from typing import Any

from superstep.errors import ConfigError
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope

_PLACES = ("rope_parameters", "rope_scaling")


def read_rope(keys: JsonKeys, model_type: str, max_tokens: int, share: float = 1.0) -> tuple[float, RopeScaling | None]:
    """Theta, and the scaling of the wavelengths.

    Args:
        keys: those of the whole file; ``rope_theta`` has the family's default.
        model_type: for errors.
        max_tokens: the original length where a scaling does not give one.
        share: of a head's numbers, those that are rotated.

    Raises:
        ConfigError: a scaling that the decoder does not have, or two values for one thing.
    """
    theta = keys.positive("rope_theta")
    thetas = {"rope_theta": theta} if "rope_theta" in keys else {}
    stretches: dict[str, RopeScaling | None] = {}
    for place in _PLACES:
        if not keys.get(place):
            continue
        part = JsonKeys(keys.table(place), f"{model_type}{place}.", _DEFAULTS)
        if "rope_theta" in part:
            thetas[f"{place}.rope_theta"] = part.positive("rope_theta")
        stretches[place] = _read_stretch(part, max_tokens, share)
        part.require_read(() if share == 1.0 else _OF_PICTURES)
    for values in (thetas, stretches):
        if len(set(values.values())) > 1:
            raise ConfigError(f"{model_type}{' and '.join(values)} contradict each other; keep the right one.")
    return next(iter(thetas.values()), theta), next(iter(stretches.values()), None)


def has_rope(keys: JsonKeys) -> bool:
    """Whether a file says something about the scaling of the wavelengths."""
    return any(keys.get(place) for place in _PLACES)


def read_layer_ropes(keys: JsonKeys, model_type: str, max_tokens: int) -> tuple[float, RopeScaling | None, float]:
    """Theta and scaling of layers that see all tokens, and theta of those with a window, which have no scaling.

    ``rope_parameters`` has an object for each kind of layer; older files have ``rope_theta``, ``rope_scaling`` and
    ``rope_local_base_freq``. Arguments and errors as of ``read_rope``.
    """
    raw, local = keys.get("rope_parameters"), keys.positive("rope_local_base_freq")
    if not raw:
        scaling = keys.get("rope_scaling")
        if isinstance(scaling, dict) and "rope_type" not in scaling:
            raise keys.refusal("rope_scaling", "must have rope_type in this family: transformers reads no other key")
        return *read_rope(keys, model_type, max_tokens), local
    if not isinstance(raw, dict) or not set(raw) <= set(_KINDS) or not all(isinstance(raw[each], dict) for each in raw):
        raise keys.refusal("rope_parameters", f"must have an object for each of {' and '.join(_KINDS)}")
    keys.require({"rope_scaling": ()})
    thetas, stretches = {}, {}
    for kind, default in zip(_KINDS, (keys.positive("rope_theta"), local), strict=True):
        place = f"{model_type}rope_parameters.{kind}."
        part = JsonKeys(raw.get(kind, {}), place, _DEFAULTS | {"rope_theta": default})
        thetas[kind], stretches[kind] = part.positive("rope_theta"), _read_stretch(part, max_tokens)
        part.require_read(())
        if kind == _KINDS[1] and stretches[kind] is not None:
            raise part.refusal("rope_type", "is not supported in layers with a window; it must be 'default'")
    return thetas[_KINDS[0]], stretches[_KINDS[0]], thetas[_KINDS[1]]


_KINDS = ("full_attention", "sliding_attention")
_OF_PICTURES = ("mrope_section", "mrope_interleaved")
"""Keys of positions of several dims, which are equal for text."""

_DEFAULTS = {
    "rope_type": "default",
    "original_max_position_embeddings": None,
    "attention_factor": None,
    "beta_fast": None,
    "beta_slow": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
}


def _read_stretch(part: JsonKeys, max_tokens: int, share: float = 1.0) -> RopeScaling | None:
    part.require({"partial_rotary_factor": (share,)})
    name = "type" if "type" in part and "rope_type" not in part else "rope_type"
    kind = part.get(name)
    part.require({"type": (kind,)})  # older files have it in the place of rope_type, some beside it
    match kind:
        case "default":
            return None
        case "linear":
            return LinearRope(factor=part.positive("factor"))
        case "llama3":
            return Llama3Rope(
                factor=part.positive("factor"),
                low_freq_factor=part.positive("low_freq_factor"),
                high_freq_factor=part.positive("high_freq_factor"),
                original_tokens=_original(part, max_tokens),
            )
        case "yarn":
            return _read_yarn(part, max_tokens)
    raise part.refusal(name, "is not supported; it must be 'default', 'linear', 'llama3' or 'yarn'")


def _read_yarn(part: JsonKeys, max_tokens: int) -> YarnRope:
    original = _original(part, max_tokens)
    factor = max_tokens / original if part.get("factor") is None else part.positive("factor")
    return YarnRope(
        factor=factor,
        original_tokens=original,
        beta_fast=part.positive("beta_fast") if part.get("beta_fast") else 32.0,
        beta_slow=part.positive("beta_slow") if part.get("beta_slow") else 1.0,
        truncate=part.flag("truncate"),
        attention_factor=_read_attention_factor(part, factor),
    )


def _read_attention_factor(part: JsonKeys, factor: float) -> float:
    above, below = part.get("mscale"), part.get("mscale_all_dim")
    if part.get("attention_factor") is not None:
        return part.positive("attention_factor")
    if above and below:
        return _sharper(factor, part.positive("mscale")) / _sharper(factor, part.positive("mscale_all_dim"))
    return _sharper(factor, 1.0)


def _sharper(factor: float, scale: float) -> float:
    """Peng 2023, eq. 22, with DeepSeek's scale of the logarithm."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _original(part: JsonKeys, max_tokens: int) -> int:
    key = "original_max_position_embeddings"
    return max_tokens if part.get(key) is None else part.whole(key)


def write_rope(
    theta: float, scaling: RopeScaling | None, local_theta: float | None = None, share: float = 1.0
) -> dict[str, Any]:
    """The keys of a ``config.json``, for all versions of transformers.

    Args:
        local_theta: of layers with a window, where they have one of their own.
        share: of a head's numbers, those that are rotated.
    """
    rope: dict[str, Any]
    match scaling:
        case None:
            rope = {"rope_type": "default"}
        case LinearRope(factor=factor):
            rope = {"rope_type": "linear", "factor": factor}
        case Llama3Rope():
            rope = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_tokens,
            }
        case YarnRope():
            rope = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_tokens,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
                "attention_factor": scaling.attention_factor,
                **({"mscale_all_dim": scaling.score_scale} if scaling.score_scale else {}),
            }
    rope["rope_theta"] = theta
    if share != 1.0:
        rope["partial_rotary_factor"] = share
    if local_theta is not None:
        local = {"rope_type": "default", "rope_theta": local_theta}
        return {"rope_parameters": dict(zip(_KINDS, (rope, local), strict=True))}
    partial = {} if share == 1.0 else {"partial_rotary_factor": share}
    return {"rope_theta": theta, "rope_parameters": rope, "rope_scaling": rope if scaling else None, **partial}

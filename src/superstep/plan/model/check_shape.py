"""check_shape: whether a decoder's numbers fit each other, and what each router of a mixture allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from superstep.errors import ConfigError
from superstep.plan.config import Positions, Router
from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.shape import (
    MOST_DISTANCE,
    MOST_EXPERTS,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_NUMBERS,
    MOST_VOCAB,
    T5_BUCKETS,
    ModelShape,
    MoeShape,
)
from superstep.plan.model.style import LLAMA


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """The limits of a router.

    Attributes:
        experts_per_token: the only number that it takes, or None for any.
        spare_experts: experts that it needs beyond those of one token.
        renormalise: its only way to weigh, or None for either.
        has_capacity: whether it drops tokens.
    """

    experts_per_token: int | None = None
    spare_experts: int = 0
    renormalise: bool | None = None
    has_capacity: bool = False


MOST_DELTA_DIM = 256
"""The widest head of linear attention: the inner dim of one product of exact mode."""

_ROUTER_RULES: dict[Router, RouterRule] = {
    "dropless": RouterRule(),
    "sigmoid": RouterRule(),
    "switch": RouterRule(experts_per_token=1, renormalise=False, has_capacity=True),
    "top2": RouterRule(experts_per_token=2, renormalise=True, has_capacity=True),
    # Its load asks how far a choice was from the best expert that was not chosen.
    "noisy-topk": RouterRule(spare_experts=1, renormalise=True),
}


def router_rule(router: Router) -> RouterRule:
    """The limits of a router; raises ConfigError for an unknown one."""
    if router not in _ROUTER_RULES:
        known = ", ".join(repr(each) for each in _ROUTER_RULES)
        raise ConfigError(f"model.router = {router!r} is unknown; set model.router to one of {known}.")
    return _ROUTER_RULES[router]


def check_shape(shape: ModelShape) -> None:
    """Check a decoder's numbers against each other; raises ConfigError where they do not fit."""
    for name in ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
        if getattr(shape, name) < 1:
            raise ConfigError(f"model.{name} = {getattr(shape, name)} must be at least 1.")
    _check_size(shape)
    if shape.heads % shape.kv_heads:
        choices = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
        raise ConfigError(
            f"model.kv_heads = {shape.kv_heads} must divide model.heads = {shape.heads}; set model.kv_heads to one of "
            f"{choices}."
        )
    if shape.head_dim % 2:
        raise ConfigError(
            f"model.head_dim = {shape.head_dim} must be even: rotary embedding turns pairs; set model.head_dim to "
            f"{shape.head_dim + 1}."
        )
    if shape.qkv_bias and (shape.qk_norm or (shape.moe and not shape.style.expert_biases)):
        name = f"experts = {shape.moe.experts}" if shape.moe else "qk_norm = true"
        raise ConfigError(
            f"model.{name} with biases on queries, keys and values: no model family has both; leave "
            f"model.{name.partition(' ')[0]} out, or choose a model.name without biases."
        )
    _check_positions(shape)
    _check_mtp(shape)
    if shape.dense_layers >= shape.layers:
        raise ConfigError(
            f"model.layers = {shape.layers} leaves no layer with experts after the {shape.dense_layers} dense ones; "
            f"set model.layers to {shape.dense_layers + 1} or more."
        )
    if shape.moe:
        if shape.style.expert_biases:
            _check_biased(shape.moe)
        elif shape.style != LLAMA and not shape.style.shared_gate:
            raise ConfigError(
                f"model.experts = {shape.moe.experts} in blocks that differ from Llama's: no model family has both; "
                "leave model.experts out, or choose another model.name."
            )
        _check_moe(shape.moe)
    if shape.style.shared_gate:
        _check_shared_gate(shape.moe)
    if shape.delta:
        _check_delta(shape, shape.delta)


def _check_shared_gate(moe: MoeShape | None) -> None:
    """Experts of Qwen3-Next."""
    if moe is None or moe.shared_experts < 1 or moe.router != "dropless":
        name = "experts = none" if moe is None else f"shared_experts = {moe.shared_experts}"
        if moe is not None and moe.router != "dropless":
            name = f"router = '{moe.router}'"
        raise ConfigError(
            f"model.{name}: these blocks have a gate for shared experts beside dropless ones; leave "
            f"model.{name.partition(' ')[0]} out, or choose another model.name."
        )


def _check_delta(shape: ModelShape, delta: DeltaShape) -> None:
    if delta.value_heads % delta.key_heads:
        raise ConfigError(
            f"linear_num_key_heads = {delta.key_heads} must divide linear_num_value_heads = {delta.value_heads}."
        )
    for name, dim in (("linear_key_head_dim", delta.key_dim), ("linear_value_head_dim", delta.value_dim)):
        if dim > MOST_DELTA_DIM:
            raise ConfigError(f"{name} = {dim} is beyond the limit; it must be {MOST_DELTA_DIM} or less.")
    if shape.rotated < 2 or shape.rotated % 2:
        raise ConfigError(
            f"partial_rotary_factor = {shape.style.rotary_share:g} of model.head_dim = {shape.head_dim} rotates "
            f"{shape.rotated} numbers, which must be even and at least 2."
        )


def _check_mtp(shape: ModelShape) -> None:
    if shape.mtp_weight is None:
        return
    if not 0 < shape.mtp_weight < math.inf:
        raise ConfigError(f"model.mtp_weight = {shape.mtp_weight} must be above 0 and finite, or left out.")
    if shape.moe or shape.delta:
        raise ConfigError(
            f"model.mtp_weight = {shape.mtp_weight} with {'experts' if shape.moe else 'linear attention'} is not "
            "supported; leave model.mtp_weight out, or choose another model.name."
        )


def _check_positions(shape: ModelShape) -> None:
    known = get_args(Positions)
    if shape.positions not in known:
        names = ", ".join(map(repr, known))
        raise ConfigError(f"model.positions = {shape.positions!r} is unknown; set model.positions to one of {names}.")
    least = T5_BUCKETS if shape.positions == "t5" else 1
    if not least <= shape.max_distance <= MOST_DISTANCE:
        raise ConfigError(
            f"model.max_distance = {shape.max_distance} must be between {least} and {MOST_DISTANCE} for "
            f"model.positions = '{shape.positions}'."
        )
    if shape.positions == "rope":
        return
    others = {
        "experts": shape.moe is not None,
        "blocks that differ from Llama's": shape.style != LLAMA,
        "biases on queries, keys and values": shape.qkv_bias,
        "layers with and without a window": bool(shape.full_layers),
    }
    for what, has_it in others.items():
        if has_it:
            raise ConfigError(
                f"model.positions = '{shape.positions}' in a model with {what}: only blocks as Llama's, Mistral's and "
                "Qwen3's have other positions than rope; leave model.positions out, or choose another model.name."
            )


def _check_size(shape: ModelShape) -> None:
    """Refuse sizes that no machine trains before anything is computed from them: a config file may hold any number."""
    experts = shape.moe.experts if shape.moe else 1
    for name, value, most in (
        ("layers", shape.layers, MOST_LAYERS),
        ("heads", shape.heads, MOST_HEADS),
        ("experts", experts, MOST_EXPERTS),
        ("vocab", shape.vocab, MOST_VOCAB),
    ):
        if value > most:
            raise ConfigError(f"model.{name} = {value} is beyond the limit; set model.{name} to {most} or less.")
    for names, size in (
        ("vocab x width", shape.vocab * shape.width),
        ("heads x head_dim x width", shape.heads * shape.head_dim * shape.width),
        ("ffn x width x experts", shape.ffn * shape.width * experts),
    ):
        if size > MOST_NUMBERS:
            raise ConfigError(
                f"model: {names} is {size:.1e} numbers, over the {MOST_NUMBERS:.1e} of a matrix; set them lower."
            )


def _check_biased(moe: MoeShape) -> None:
    """Experts with biases are gpt-oss's: refuse what its router does not do."""
    for name, value, only in (
        ("router", moe.router, "dropless"),
        ("shared_experts", moe.shared_experts, 0),
        ("renormalise", moe.renormalise, True),
    ):
        if value != only:
            raise ConfigError(
                f"model.{name} = {value!r} with biases of experts: no model family has both; leave "
                f"model.{name} out, or choose a model.name without them."
            )


def _check_moe(moe: MoeShape) -> None:
    for name, least in (("experts", 1), ("experts_per_token", 1), ("shared_experts", 0)):
        if getattr(moe, name) < least:
            raise ConfigError(f"model.{name} = {getattr(moe, name)} must be at least {least}.")
    rule = router_rule(moe.router)
    if rule.experts_per_token not in (None, moe.experts_per_token):
        raise ConfigError(
            f"model.experts_per_token = {moe.experts_per_token} is not what model.router = '{moe.router}' takes; "
            f"set model.experts_per_token to {rule.experts_per_token}."
        )
    least = moe.experts_per_token + rule.spare_experts
    if moe.experts < least:
        raise ConfigError(
            f"model.experts = {moe.experts} are too few for model.router = '{moe.router}' with "
            f"model.experts_per_token = {moe.experts_per_token}; set model.experts to {least}."
        )
    if rule.renormalise not in (None, moe.renormalise):
        raise ConfigError(
            f"model.renormalise = {str(moe.renormalise).lower()} has no meaning for model.router = '{moe.router}'; "
            "leave it out, or choose 'dropless'."
        )
    least_each = 2 if moe.groups > 1 else 1  # the router ranks a group by its two best experts
    enough = moe.groups * max(least_each, -(-moe.experts_per_token // max(1, moe.groups_per_token)))
    if moe.experts % moe.groups or moe.experts < least_each * moe.groups or not 1 <= moe.groups_per_token <= moe.groups:
        raise ConfigError(
            f"model.experts = {moe.experts} in {moe.groups} groups, of which a token takes {moe.groups_per_token}: "
            f"groups must be alike, of two experts or more; set model.experts to {enough} or another multiple."
        )
    if moe.experts_per_token > moe.experts // moe.groups * moe.groups_per_token:
        raise ConfigError(
            f"model.experts_per_token = {moe.experts_per_token} is more than {moe.groups_per_token} of {moe.groups} "
            f"groups have; set model.experts_per_token to {moe.experts // moe.groups * moe.groups_per_token} or less."
        )
    if (moe.capacity_factor is None) == rule.has_capacity:
        raise ConfigError(
            f"model.capacity_factor = {moe.capacity_factor} has no meaning for model.router = '{moe.router}'; "
            "leave it out, or choose 'switch' or 'top2'."
        )
    if moe.capacity_factor is not None and not 0 < moe.capacity_factor < math.inf:
        raise ConfigError(f"model.capacity_factor = {moe.capacity_factor} must be above 0.")
    for name in ("balance_weight", "z_weight"):
        if not 0 <= getattr(moe, name) < math.inf:
            raise ConfigError(f"model.{name} = {getattr(moe, name)} must be at least 0.")

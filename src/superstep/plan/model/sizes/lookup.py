"""shape_of: the shape of a ``[model]`` section."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from superstep.errors import ConfigError, did_you_mean
from superstep.plan.config import ModelConfig, Router
from superstep.plan.model.check_shape import check_shape, router_rule
from superstep.plan.model.hf_config import from_hf_config, model_type, read_json
from superstep.plan.model.hf_families import PRICED_TYPE
from superstep.plan.model.shape import ModelShape, MoeShape
from superstep.plan.model.sizes import mla_models
from superstep.plan.model.sizes.named_sizes import SHAPES


def shape_of(config: ModelConfig, *, is_priced: bool = False) -> ModelShape:
    """The whole shape of a ``[model]`` section.

    Args:
        is_priced: whether the model is only priced: then it may also be a DeepSeek-V2.

    Raises:
        ConfigError: an unknown name, an unreadable or foreign config.json, numbers that do not fit, or a model that is
        priced and not trained.
    """
    base = _base(config)
    if base.is_priced_only and not is_priced:
        raise ConfigError(
            f"model.name = '{config.name}' has {' and '.join(base.priced_only)}, which superstep plan can price "
            "but Superstep cannot train yet; set model.name to another named size, for example 'qwen3-30b-a3b'."
        )
    return _change_shape(config, base)


def _base(config: ModelConfig) -> ModelShape:
    if config.name in SHAPES:
        return SHAPES[config.name]
    if config.name.endswith(".json"):
        path = Path(config.name)
        kind = read_json(path).get("model_type")
        return mla_models.from_latent_config(path) if kind == PRICED_TYPE else from_hf_config(path)
    raise ConfigError(
        f"model.name = '{config.name}' is neither a named size nor the path of a config.json"
        + did_you_mean(config.name, SHAPES)
    )


_POSITIONS = ("positions", "max_distance")


def _change_shape(config: ModelConfig, base: ModelShape) -> ModelShape:
    names = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "qk_norm", *_POSITIONS)
    over = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if "head_dim" not in over and ("width" in over or "heads" in over) and base.family == "llama":
        width, heads = over.get("width", base.width), over.get("heads", base.heads)
        if heads < 1 or width % heads:
            raise ConfigError(
                f"model.width = {width} does not split into model.heads = {heads} heads; set model.head_dim, or heads "
                "to a divisor of the width."
            )
        over["head_dim"] = width // heads
    if "heads" in over and "kv_heads" not in over and over["heads"] % base.kv_heads:
        over["kv_heads"] = over["heads"]
    if "layers" in over and base.full_layers:  # the pattern goes on, with one full layer at least
        full = [layer for layer in range(over["layers"]) if layer % base.layers in base.full_layers]
        over["full_layers"] = tuple(full) or (over["layers"] - 1,)
    if config.norm_group is not None:
        raise ConfigError(
            f"model.norm_group = {config.norm_group} with {config.label}: the decoder has no batch norm; leave it out."
        )
    shape = replace(base, moe=_mixture(config, base.moe), dropout=config.dropout, mtp_weight=config.mtp_weight, **over)
    check_shape(shape)
    model_type(shape)  # raises ConfigError if no family has such blocks
    return shape


_MIXTURE = tuple(field.name for field in fields(MoeShape) if field.name in {each.name for each in fields(ModelConfig)})


def _mixture(config: ModelConfig, base: MoeShape | None) -> MoeShape | None:
    over = {name: getattr(config, name) for name in _MIXTURE if getattr(config, name) is not None}
    if not over:
        return base
    experts = over.get("experts", base.experts if base else None)
    if experts is None:
        name, value = next(iter(over.items()))
        raise ConfigError(
            f"model.{name} = {value} needs experts, but model.name = '{config.name}' has none; set model.experts to 8."
        )
    router: Router = over.get("router", base.router if base else "dropless")
    if base is None or router != base.router:
        base = _usual(router, experts, base)
    return replace(base, **over)


def _usual(router: Router, experts: int, base: MoeShape | None) -> MoeShape:
    """The values of the router's paper; what does not depend on the router stays as in ``base``."""
    rule = router_rule(router)
    return MoeShape(
        router=router,
        experts=experts,
        experts_per_token=rule.experts_per_token or max(1, min(2, experts - rule.spare_experts)),
        shared_experts=base.shared_experts if base else 0,
        renormalise=rule.renormalise is not False,
        # Fedus 2021, table 1: beyond 1.25 little is gained.
        capacity_factor=1.25 if rule.has_capacity else None,
        # Shazeer 2017, table 6; Fedus 2021, sec. 2.2.
        balance_weight=0.1 if router == "noisy-topk" else 0.01,
        z_weight=base.z_weight if base else 0.0,
    )

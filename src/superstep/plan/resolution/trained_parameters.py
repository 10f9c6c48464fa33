"""Which parameters of a model a run trains: all; or adapters beside it; or all but those that ``[freeze]`` names."""

from __future__ import annotations

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.model.outline import Outline
from superstep.plan.model.shape import ModelShape
from superstep.plan.narrow import check_narrow, find_narrow
from superstep.plan.resolution.freeze import freeze
from superstep.plan.resolution.lora import add_lora
from superstep.plan.resolution.phase_settings import check_phases
from superstep.plan.resolution.sparse import check_sparse
from superstep.plan.rules import Rules


def choose_trained(config: RunConfig, shape: ModelShape | None, outline: Outline) -> Outline:
    """``mark_trained``, and a check of the tables with sparse gradients. Raises as it does."""
    outline = mark_trained(config, shape, outline)
    check_sparse(config, outline)
    return outline


def mark_trained(config: RunConfig, shape: ModelShape | None, outline: Outline) -> Outline:
    """The outline with a run's adapters, and with its frozen parameters marked.

    Args:
        config: the run's.
        shape: our own decoder's; None for a user's model.
        outline: of the model.

    Raises:
        ConfigError: the model cannot be trained so.
    """
    check_phases(config, outline)
    if config.lora is not None:
        if config.freeze is not None:
            raise ConfigError("freeze with lora: adapters alone are trained beside a frozen model; leave [freeze] out.")
        if shape is not None and shape.moe is not None:
            raise ConfigError(
                f"lora with model.experts = {shape.moe.experts}: adapters are trained beside the linears of dense "
                "models only; leave [lora] out, or choose a model without experts."
            )
        return add_lora(outline, config.lora)
    if config.freeze is None:
        return outline
    if shape is not None and shape.moe is not None:
        raise ConfigError(
            f"freeze with model.experts = {shape.moe.experts}: parameters of dense models alone can be frozen; leave "
            "[freeze] out, or choose a model without experts."
        )
    return freeze(outline, config.freeze)


def list_frozen_units(outline: Outline) -> tuple[int, ...]:
    """The units that own no trained parameter; () where nothing is frozen."""
    if not any(p.is_frozen for unit in outline.units for p in unit.parameters):
        return ()
    return tuple(number for number, owned in enumerate(outline.owned) if all(p.is_frozen for p in owned))


def choose_narrow(config: RunConfig, outline: Outline, rules: Rules) -> frozenset[str]:
    """The names of parameters with moments in fewer bits than fp32; raises ConfigError where tp would cut a block."""
    check_narrow(config, outline, rules)
    return find_narrow(config, outline)

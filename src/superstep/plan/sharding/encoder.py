"""The rules of ``plan.encoder``, for an encoder that every pipeline rank holds."""

from __future__ import annotations

from superstep.errors import ConfigError
from superstep.plan.config import PlanConfig, RunConfig
from superstep.plan.model.outline import Outline
from superstep.plan.sharding.edges import Values, list_taken_values


def count_in_front(outline: Outline, plan: PlanConfig) -> int:
    """The units that are a stage of their own on every pipeline rank, in front of those that are cut into stages."""
    return 0 if plan.encoder == "front" else len(outline.encoder)


def check_encoder(outline: Outline, plan: PlanConfig) -> None:
    """Check ``plan.encoder`` against a filled plan and its model.

    Raises:
        ConfigError: names the field, its value and what would work.
    """
    if plan.encoder == "front":
        return
    setting = f"plan.encoder = '{plan.encoder}'"
    units = outline.encoder
    if not units:
        raise ConfigError(
            f"{setting} places an encoder, and the model has none; set plan.encoder to 'front', or mark the encoder's "
            "units with is_encoder."
        )
    if units != tuple(range(len(units))):
        raise ConfigError(
            f"{setting} needs the encoder's units in front of all others, and '{outline.names[units[-1]]}' is behind "
            "another; list the encoder's units first."
        )
    if plan.pp == 1:
        raise ConfigError(f"{setting} shares an encoder between pipeline ranks, and plan.pp = 1; set plan.pp above 1.")
    if plan.schedule not in ("gpipe", "1f1b", "zb-h1"):
        raise ConfigError(
            f"{setting} needs one stage on each pipeline rank, and plan.schedule = '{plan.schedule}' has several; set "
            "plan.schedule to 'gpipe', '1f1b' or 'zb-h1'."
        )


def check_rows(config: RunConfig, outline: Outline, stages: tuple[Values, ...]) -> tuple[Values, ...]:
    """The stages, if every rank has microbatches to encode, and only the first rank takes an encoder's rows.

    Raises:
        ConfigError: names the field, its value and what would work.
    """
    plan = config.plan
    if plan.encoder == "front":
        return stages
    assert plan.dp is not None
    assert plan.microbatch is not None
    microbatches = config.train.batch_sequences // (plan.dp * plan.microbatch)
    if microbatches < plan.pp:
        raise ConfigError(
            f"plan.encoder = '{plan.encoder}' gives each of plan.pp = {plan.pp} ranks microbatches, and a step has "
            f"{microbatches}; raise train.batch_sequences, or lower plan.microbatch."
        )
    taken = list_taken_values(len(outline.names), outline.inputs)
    for unit in (unit for units in stages[2:] for unit in units):
        if any(value - 1 in stages[0] for value in taken[unit]):
            raise ConfigError(
                f"plan.encoder = '{plan.encoder}' sends an encoder's rows to the first stage, and unit "
                f"'{outline.names[unit]}' of a later one takes them too; set plan.stages so that the first has it."
            )
    return stages

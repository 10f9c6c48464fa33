"""Skipped data and rollback: the meaning of their settings, and which are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.rollback import RollbackConfig


def batches_left_out(skip: Iterable[str]) -> dict[int, int]:
    """The number of batches left out after each step, from entries ``STEP:BATCHES``; those of one step add up. Raises
    ConfigError where an entry has another form.
    """
    left: dict[int, int] = {}
    for each in skip:
        parts = re.fullmatch(r"([0-9]+):([1-9][0-9]*)", each)
        if parts is None:
            raise ConfigError(
                f"train.skip = '{each}' is not STEP:BATCHES; write '40:3' to leave 3 batches out after step 40."
            )
        step, batches = int(parts[1]), int(parts[2])
        left[step] = left.get(step, 0) + batches
    return left


def check_rollback(rollback: RollbackConfig) -> None:
    """Check the rules of rollback; raises ConfigError where one cannot work."""
    least = {"window_steps": 4, "back_steps": 0, "skip_batches": 0, "repeats": 1}
    for name, at_least in least.items():
        if not (value := getattr(rollback, name)) >= at_least:
            raise ConfigError(f"rollback.{name} = {value} must be at least {at_least}.")
    for name in ("loss_sigmas", "norm_sigmas"):
        if not (value := getattr(rollback, name)) > 0:
            raise ConfigError(f"rollback.{name} = {value} must be above 0; 6 is usual, inf turns the rule off.")
    if 0 < rollback.skip_batches <= rollback.back_steps:
        raise ConfigError(
            f"rollback.skip_batches = {rollback.skip_batches} does not reach the step's own batch, which comes after "
            f"rollback.back_steps = {rollback.back_steps} others; set rollback.skip_batches to "
            f"{rollback.back_steps + 1} or more, or to 0 to train on the same again."
        )


def check_recompute(config: RunConfig, *, dp: int, has_experts: bool) -> None:
    """Check that a gradient has the same bits on whichever ranks compute it; raises ConfigError where it does not, or
    there are no other ranks.
    """
    every = f"state.recompute_every = {config.state.recompute_every}"
    if not config.numerics.exact:
        raise ConfigError(f"{every} compares bits, which only exact mode promises; set numerics.exact = true.")
    if dp == 1:
        raise ConfigError(f"{every} has a place's rows computed by another, and plan.dp = 1; set plan.dp to 2 or more.")
    if has_experts:
        raise ConfigError(f"{every}: what experts are sent depends on the place; leave it out, or model.experts.")

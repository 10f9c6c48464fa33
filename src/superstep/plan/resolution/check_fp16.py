"""check_fp16: refuses what fp16 does not train, and a loss scale that cannot work."""

from __future__ import annotations

import math

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.loss_scale import LossScaleConfig

MOST_STEPS = 10**8


def check_fp16(config: RunConfig) -> None:
    """Check the settings of fp16, and that all others support it; raises ConfigError where they do not."""
    if config.numerics.compute != "fp16":
        if config.loss_scale is not None:
            raise ConfigError(
                f"[loss_scale] with numerics.compute = '{config.numerics.compute}', whose numbers are as wide as those "
                "of fp32; leave it out, or set numerics.compute to fp16."
            )
        return
    instead = "set numerics.compute to bf16 or fp32"
    if config.numerics.exact:
        raise ConfigError(f"numerics.compute = 'fp16' with numerics.exact: exact sums have no order for it; {instead}.")
    if config.numerics.kernels == "triton":
        raise ConfigError(
            "numerics.compute = 'fp16' with numerics.kernels = 'triton': only torch's kernels compute it; set "
            "numerics.kernels to torch."
        )
    if config.phases is not None:
        raise ConfigError(f"numerics.compute = 'fp16' with [phases]: a scale holds for one loss; {instead}.")
    _check_scale(config.loss_scale or LossScaleConfig())


def _check_scale(scale: LossScaleConfig) -> None:
    for name in ("start", "growth", "backoff", "floor"):
        value = getattr(scale, name)
        if not 0 < value < math.inf or math.frexp(value)[0] != 0.5:
            raise ConfigError(f"loss_scale.{name} = {value} must be a power of two, so that it rounds nothing.")
    if scale.growth < 1:
        raise ConfigError(f"loss_scale.growth = {scale.growth} must be at least 1; 2 is usual.")
    if scale.backoff >= 1:
        raise ConfigError(f"loss_scale.backoff = {scale.backoff} must be below 1; 0.5 is usual.")
    if not 1 <= scale.floor <= scale.start:
        raise ConfigError(f"loss_scale.floor = {scale.floor} must lie between 1 and loss_scale.start = {scale.start}.")
    if not 1 <= scale.growth_steps <= MOST_STEPS:
        raise ConfigError(f"loss_scale.growth_steps = {scale.growth_steps} must lie between 1 and {MOST_STEPS}.")

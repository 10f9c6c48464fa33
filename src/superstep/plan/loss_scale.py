"""LossScaleConfig: how fp16's loss scale changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleConfig:
    """The loss scale of `numerics.compute = "fp16"` (Micikevicius 2018): powers of two. Without the table its defaults
    hold.
    """

    start: float = 65536.0
    """The first scale."""
    growth: float = 2.0
    """The scale is multiplied by it after `growth_steps` steps without an overflow; 1 leaves it."""
    growth_steps: int = 2000
    """See `growth`."""
    backoff: float = 0.5
    """The scale is multiplied by it after a step with an overflow, which all ranks skip."""
    floor: float = 1.0
    """The least scale; a step that overflows with it ends the run."""

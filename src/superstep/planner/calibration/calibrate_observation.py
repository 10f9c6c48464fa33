"""Calibrate by observations of a stack: a step's seconds, of a published run or of ours, or a measured rate.

One number cannot tell which constant was wrong. Each constant of the step moves in proportion to its uncertainty: with
s the slopes of the step's logarithm, V the covariance of the constants' logarithms, and e the logarithm of predicted
over true seconds,

    believed = V · s / (s · V · s + NOISE²),  logs of constants -= believed · e,  V -= believed · (V · s)

At first V is diagonal. A stack's own constants differ more than the estimates' errors, which average over stacks: by
``APART``. A plan's interval becomes narrower with the knowledge of its constants:

    width *= sqrt((s · V · s + NOISE²) / (s · V before · s + NOISE²))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from superstep.cost.closed.constants import CONSTANTS
from superstep.cost.closed.efficiency import FITTED, Efficiency
from superstep.hardware.units import Array

NOISE = 0.04
"""Standard deviation of the logarithm of a step's seconds: two publications of the same run differ by this."""
APART = 10.0**0.5
"""How far a stack's own constant is from the estimate, in errors of the estimate."""
STRANGE = 0.5
"""A step with a larger error of its logarithm is not believed: so are one in a hundred published ones, with their stack
left out; those are averages of whole runs, or misread plans.
"""
MEASURED = 0.03
"""Standard deviation of the logarithm of a measured rate."""
STEP = 1e-2


def variances_of(errors: Mapping[str, float | None]) -> Array:
    """Variances of the constants' logarithms in a stack, from the errors of their estimates (None if unknown)."""
    spreads = [errors[name] if errors[name] is not None else constant.spread for name, constant in CONSTANTS.items()]
    return (APART * np.array(spreads, dtype=float)) ** 2


def belief(slopes: Array, variances: Array) -> Array:
    """The share of a unit deviation attributed to each constant's logarithm; slopes may be many rows."""
    known = (variances * slopes**2).sum(axis=-1, keepdims=True) + NOISE**2
    share: Array = variances * slopes / known
    return share


def slopes_of(log_seconds: Callable[[Efficiency], Array], efficiency: Efficiency) -> Array:
    """Slopes of a step's log seconds by the logarithm of each constant."""
    here = log_seconds(efficiency)
    moved = [efficiency.with_changes({name: efficiency[name] * float(np.exp(STEP))}) for name in CONSTANTS]
    return np.array([float(log_seconds(each) - here) / STEP for each in moved])


@dataclass(frozen=True, slots=True)
class Guide:
    """What is known of the constants.

    Attributes:
        efficiency: their values.
        covariance: of their logarithms.
        before: the same before any observation.
    """

    efficiency: Efficiency
    covariance: Array
    before: Array

    def after_step(self, slopes: Array, error: float) -> Guide:
        """The knowledge after a step; ``error``: the logarithm of its predicted over its true seconds."""
        return self._after(slopes, error, NOISE)

    def after_rate(self, name: str, value: float) -> Guide:
        """The knowledge after a constant was measured."""
        slopes = np.array([float(each == name) for each in CONSTANTS])
        return self._after(slopes, float(np.log(self.efficiency[name] / value)), MEASURED)

    def with_values(self, efficiency: Efficiency) -> Guide:
        """The same with other values of the constants."""
        return replace(self, efficiency=efficiency)

    def remaining_width(self, slopes: Array) -> float:
        """The remaining width of an interval of a plan with these slopes."""
        now, then = (slopes @ each @ slopes + NOISE**2 for each in (self.covariance, self.before))
        return float(np.sqrt(now / then))

    def _after(self, slopes: Array, error: float, noise: float) -> Guide:
        bears = self.covariance @ slopes
        share = bears / (slopes @ bears + noise**2)
        values = {}
        for (name, constant), change in zip(CONSTANTS.items(), -share * error, strict=True):
            moved = self.efficiency[name] * float(np.exp(change))
            # Shares stay below 1.
            values[name] = min(moved, 1.0) if constant.before <= 1.0 else moved
        covariance = self.covariance - np.outer(share, bears)
        return Guide(self.efficiency.with_changes(values), covariance, self.before)


def guide() -> Guide:
    """The knowledge from published runs of a stack that is not among them."""
    covariance = np.diag(variances_of({name: constant.error for name, constant in CONSTANTS.items()}))
    return Guide(FITTED, covariance, covariance)

"""Calibrate by what was seen of a stack: a step's seconds, of a published run or of ours, or a measured rate.

One number cannot tell which constant was wrong. Each that a step depends on is moved as far as it is uncertain: with s
the slopes of the step's logarithm, V the covariance of the constants' logarithms, and e how much longer the step was
predicted than it took, in logarithms,

    believed = V · s / (s · V · s + NOISE²),  logs of constants -= believed · e,  V -= believed · (V · s)

At first V is diagonal. A stack is further from the constants than their estimates' errors say, which average over
stacks: ``APART`` as much. A plan's interval is narrower by what was learned of the constants that it depends on itself:

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
"""Of the logarithm of a step's seconds: the same run published twice differs by so much."""
APART = 10.0**0.5
"""Of a constant's error, how far a stack's own value lies from the estimate."""
STRANGE = 0.5
"""A step whose logarithm is further off than this is not believed: one in a hundred published ones is, with its stack
left out, and those are averages of whole runs, or plans that were misread."""
MEASURED = 0.03
"""Of the logarithm of a measured rate."""
STEP = 1e-2


def variances_of(errors: Mapping[str, float | None]) -> Array:
    """Of the constants' logarithms in a stack, from the errors of their estimates; None where nothing bears on one."""
    spreads = [errors[name] if errors[name] is not None else constant.spread for name, constant in CONSTANTS.items()]
    return (APART * np.array(spreads, dtype=float)) ** 2


def belief(slopes: Array, variances: Array) -> Array:
    """For one of deviation, how much of it each constant's logarithm is taken to be off; slopes may be many rows."""
    known = (variances * slopes**2).sum(axis=-1, keepdims=True) + NOISE**2
    share: Array = variances * slopes / known
    return share


def narrowing(observed: Array, others: Array, variances: Array) -> Array:
    """What is left of the width of others' intervals."""
    k = (variances * observed * others).sum(axis=-1)
    own, of_others = ((variances * each**2).sum(axis=-1) + NOISE**2 for each in (observed, others))
    left: Array = np.sqrt(1 - k**2 / (own * of_others))
    return left


def slopes_of(log_seconds: Callable[[Efficiency], Array], efficiency: Efficiency) -> Array:
    """Of the logarithm of a step's seconds, by the logarithm of each constant."""
    here = log_seconds(efficiency)
    moved = [efficiency.changed({name: efficiency[name] * float(np.exp(STEP))}) for name in CONSTANTS]
    return np.array([float(log_seconds(each) - here) / STEP for each in moved])


@dataclass(frozen=True, slots=True)
class Guide:
    """What is known of the constants.

    Attributes:
        efficiency: their values.
        covariance: of their logarithms.
        before: the same before anything was seen.
    """

    efficiency: Efficiency
    covariance: Array
    before: Array

    def after_step(self, slopes: Array, error: float) -> Guide:
        """What is known once a step was seen; ``error`` is the logarithm of its predicted over its true seconds."""
        return self._after(slopes, error, NOISE)

    def after_rate(self, name: str, value: float) -> Guide:
        """What is known once a constant was measured."""
        slopes = np.array([float(each == name) for each in CONSTANTS])
        return self._after(slopes, float(np.log(self.efficiency[name] / value)), MEASURED)

    def with_values(self, efficiency: Efficiency) -> Guide:
        """The same with constants that were found elsewhere."""
        return replace(self, efficiency=efficiency)

    def narrowed(self, slopes: Array) -> float:
        """What is left of the width of an interval of a plan with these slopes."""
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
        return Guide(self.efficiency.changed(values), covariance, self.before)


def guide() -> Guide:
    """What published runs tell of a stack that is not among them."""
    covariance = np.diag(variances_of({name: constant.error for name, constant in CONSTANTS.items()}))
    return Guide(FITTED, covariance, covariance)

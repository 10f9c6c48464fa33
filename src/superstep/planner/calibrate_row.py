"""Calibrate by one step's seconds: of a published run, or of ours.

One number cannot tell which constant was wrong. Each that the step depends on is moved as far as it is uncertain: with
s the slopes of the step's logarithm, v the constants' variances, e how much longer the step was predicted than it took,

    believed = v · s / (s · v · s + NOISE²),  logs of constants -= believed · e

A stack is further from the constants than their estimates' errors say, which average over stacks: ``APART`` as much.
What this explains of another plan's step narrows its interval: with k the covariance of the two,

    width *= sqrt(1 - k² / ((k of the plan + NOISE²) · (k of the step + NOISE²)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from superstep.cost.closed.constants import CONSTANTS
from superstep.cost.closed.efficiency import Efficiency
from superstep.hardware.units import Array

NOISE = 0.04
"""Of the logarithm of a step's seconds: the same run published twice differs by so much."""
APART = 10.0**0.5
"""Of a constant's error, how far a stack's own value lies from the estimate."""
STEP = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A step that calibrates.

    Attributes:
        slopes: of the logarithm of its predicted seconds, by each of ``CONSTANTS``' logarithm.
        variances: of these logarithms.
        error: logarithm of predicted over true seconds.
    """

    slopes: Array
    variances: Array
    error: float

    @property
    def changes(self) -> Array:
        """What is added to the constants' logarithms."""
        return -believed(self.slopes, self.variances) * self.error

    def narrowed(self, slopes: Array) -> float:
        """What is left of the interval's width of a plan with these slopes."""
        return float(narrowing(self.slopes, slopes, self.variances))


def variances_of(errors: Mapping[str, float | None]) -> Array:
    """Of the constants' logarithms in a stack, from the errors of their estimates; None where nothing bears on one."""
    found = [errors[name] if errors[name] is not None else constant.spread for name, constant in CONSTANTS.items()]
    return (APART * np.array(found, dtype=float)) ** 2


def believed(slopes: Array, variances: Array) -> Array:
    """For one of deviation, how much of it each constant's logarithm is taken to be off; slopes may be many rows."""
    known = (variances * slopes**2).sum(axis=-1, keepdims=True) + NOISE**2
    share: Array = variances * slopes / known
    return share


def narrowing(seen: Array, others: Array, variances: Array) -> Array:
    """What is left of the width of others' intervals."""
    k = (variances * seen * others).sum(axis=-1)
    own, of_others = ((variances * each**2).sum(axis=-1) + NOISE**2 for each in (seen, others))
    left: Array = np.sqrt(1 - k**2 / (own * of_others))
    return left


def slopes_of(log_seconds: Callable[[Efficiency], Array], efficiency: Efficiency) -> Array:
    """Of the logarithms of steps' seconds, by the logarithm of each constant: [constants, ...]."""
    here = log_seconds(efficiency)
    moved = [efficiency.changed({name: efficiency[name] * float(np.exp(STEP))}) for name in CONSTANTS]
    return np.stack([(log_seconds(each) - here) / STEP for each in moved])


def calibrated_by(seen: Seen, efficiency: Efficiency) -> Efficiency:
    """The constants after a step was seen; shares stay below 1."""
    values = {}
    for (name, constant), change in zip(CONSTANTS.items(), seen.changes, strict=True):
        moved = efficiency[name] * float(np.exp(change))
        values[name] = min(moved, 1.0) if constant.before <= 1.0 else moved
    return efficiency.changed(values)

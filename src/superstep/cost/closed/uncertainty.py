"""Interval: how far a step's seconds, and a plan's memory, may be from what the formulas say.

The numbers hold 80% of published steps, each predicted by constants that were fitted without the stack it is of, its
sources, its clusters and its framework's name (``python -m bench.published``). A step is oftener slower than predicted
than faster, and less is known of it the more of it is traffic, where it is a mixture of experts, and where a plan is
not stated whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superstep.hardware.units import Array

SHARE = 0.8
UNSEEN_STEPS, UNSEEN_PEAKS = 0.51, 0.28
"""What the ranges held of 175 steps and 134 peaks, published by seven sources that nothing was learned from and whose
software, or chips, were new (``python -m bench.published_unseen``): far less than ``SHARE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What makes an interval wide, as logarithms of the factor upwards; they add up as deviations do that are free of
    each other.

    Attributes:
        plain: of every step.
        traffic: times the share of the step that is traffic which nothing hides.
        unstated: where a parameter of the plan is not stated.
        mixture: of experts.
        below: the logarithm downwards over that upwards.
    """

    plain: float
    traffic: float
    unstated: float
    mixture: float
    below: float

    def upwards(self, traffic: Array, is_open: Array, is_mixture: Array) -> Array:
        """Logarithms of the factors upwards."""
        parts = ((self.plain, 1.0), (self.traffic, traffic), (self.unstated, is_open), (self.mixture, is_mixture))
        return np.sqrt(sum(((size * share) ** 2 for size, share in parts), np.zeros(())))


STEP = Spread(plain=0.178, traffic=0.307, unstated=0.274, mixture=0.332, below=0.663)

MEMORY = (0.865, 1.119)
"""Factors that held 80% of published peaks, of software whose name is known."""
SURE = 0.95
FULL = 0.85
"""Share of a chip's memory up to which a plan fits with a probability of ``SURE``: of published layouts that were
predicted to take 80 to 85% of it 5% were out of memory, of those at 85 to 90% 13%, at 90 to 95% 45%."""


def around(
    seconds: float, *, traffic: float, is_open: bool = False, is_mixture: bool = False, narrowed: float = 1.0
) -> tuple[float, float]:
    """The seconds between which a step lies with a probability of ``SHARE``.

    Args:
        seconds: as predicted.
        traffic: share of them that is traffic which nothing hides.
        is_open, is_mixture: see ``Spread``.
        narrowed: what calibration leaves of the width.
    """
    factors = STEP.upwards(np.asarray(traffic), np.asarray(float(is_open)), np.asarray(float(is_mixture)))
    width = narrowed * float(factors)
    return seconds * float(np.exp(-STEP.below * width)), seconds * float(np.exp(width))


def around_bytes(size: float) -> tuple[float, float]:
    """The bytes between which a plan's peak lies with a probability of ``SHARE``."""
    low, high = MEMORY
    return size * low, size * high

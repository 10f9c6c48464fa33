"""Spread: the intervals of a step's seconds, and of a plan's memory, around the formulas.

The numbers hold 80% of published steps, each predicted by constants that were fitted without the stack it is of, its
sources, its clusters and its framework's name (``python -m bench.published``). Steps are more often slower than
predicted than faster; intervals are wider with more traffic, for mixtures of experts, and where a plan is not fully
stated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superstep.hardware.units import Array

SHARE = 0.8
UNSEEN_STEPS, UNSEEN_PEAKS = 0.51, 0.28
"""Shares of 175 steps and 134 peaks within their intervals, for seven sources outside the fit with new software or
chips (``python -m bench.published_unseen``): far less than ``SHARE``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The causes of an interval's width, as logarithms of the factor upwards; they add up as independent deviations do.

    Attributes:
        plain: of every step.
        traffic: times the share of exposed traffic in the step.
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
"""Factors that held 80% of published peaks, for software with a known name."""
SURE = 0.95
FULL = 0.85
"""Share of a chip's memory up to which a plan fits with a probability of ``SURE``: of published layouts predicted at 80
to 85% of it, 5% ran out of memory, of those at 85 to 90% 13%, at 90 to 95% 45%.
"""


def around(
    seconds: float, *, traffic: float, is_open: bool = False, is_mixture: bool = False, narrowed: float = 1.0
) -> tuple[float, float]:
    """The interval of a step's seconds with a probability of ``SHARE``.

    Args:
        seconds: as predicted.
        traffic: share of exposed traffic in them.
        is_open, is_mixture: see ``Spread``.
        narrowed: the factor of the width after calibration.
    """
    factors = STEP.upwards(np.asarray(traffic), np.asarray(float(is_open)), np.asarray(float(is_mixture)))
    width = narrowed * float(factors)
    return seconds * float(np.exp(-STEP.below * width)), seconds * float(np.exp(width))


def around_bytes(size: float) -> tuple[float, float]:
    """The interval of a plan's peak bytes with a probability of ``SHARE``."""
    low, high = MEMORY
    return size * low, size * high

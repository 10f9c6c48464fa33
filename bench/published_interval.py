"""Intervals: how wide 80% are, from the residuals of stacks that nothing was learned from.

What is known of a row decides the shape (``cost.closed.uncertainty.Spread``): the share of its step that is traffic,
whether its plan is stated whole, whether it is a mixture. The interval is for a row of the next stack, and a stack's
rows are off together: they have a part of their variance in common (``alike``). Of n rows with the part r each tells
1 / (1 + (n - 1) · r) of what a lone one would (Kish 1965, sec. 5.4), and weighs so much. Rows that are averages of
whole runs, or rounded, tell nothing of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from bench.published_rows import Row, number
from superstep.cost.closed.estimate import Estimate
from superstep.cost.closed.uncertainty import SHARE, Spread
from superstep.hardware.units import Array

ROUNDS = 4
"""Of the shape and of what rows have in common, in turn: each is fitted with the other."""
USUAL = -2.5
"""Of a part's logarithm before it is fitted, as loosely held as ``HELD``."""
HELD = 0.002
TRAFFIC = ("tensor_s", "context_s", "experts_s", "transfers_s", "data_s")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of rows beforehand: columns of one length."""

    traffic: Array
    is_open: Array
    is_mixture: Array

    @property
    def columns(self) -> Array:
        """[rows, 4], the first for every row."""
        return np.stack([np.ones_like(self.traffic), self.traffic, self.is_open, self.is_mixture], axis=1)

    def where(self, mask: Array) -> Known:
        """Some of the rows."""
        return Known(self.traffic[mask], self.is_open[mask], self.is_mixture[mask])


def known(rows: Sequence[Row], parts: Estimate) -> Known:
    """Of each row, with the parts of its predicted step."""
    traffic: Array = sum((getattr(parts, name) for name in TRAFFIC), np.zeros(len(rows))) / parts.step_s
    # By the table's own word: a parameter of the plan is unstated.
    is_open = [row["trust"] != "A" for row in rows]
    is_mixture = [number(row, "n_experts") > 0 for row in rows]
    return Known(traffic, np.array(is_open, dtype=float), np.array(is_mixture, dtype=float))


def spread(deviations: Array, stacks: Sequence[str], told: Known) -> Spread:
    """The interval that holds ``SHARE`` of the deviations: logarithms of published over predicted seconds.

    The shape makes the deviations, taken as Laplace's, likeliest; the two widths are quantiles of what is left of them.
    """
    squares, common = told.columns**2, 0.5
    for _ in range(ROUNDS):
        weights = weights_of(stacks, common)
        shape = _likeliest(deviations, squares, weights)
        scaled = deviations / np.sqrt(squares @ shape**2)
        common = alike(scaled, stacks)
    low, high = (quantile(scaled, weights, share) for share in ((1 - SHARE) / 2, (1 + SHARE) / 2))
    plain, traffic, unstated, mixture = (float(part * high) for part in shape)
    return Spread(plain=plain, traffic=traffic, unstated=unstated, mixture=mixture, below=-low / high)


def _likeliest(deviations: Array, squares: Array, weights: Array) -> Array:
    def unlikely(logs: Array) -> float:
        scale = np.sqrt(squares @ np.exp(2 * logs))
        return float(
            (weights * (np.log(scale) + np.abs(deviations) / scale)).sum() + HELD * ((logs - USUAL) ** 2).sum()
        )

    shape: Array = np.exp(minimize(unlikely, np.full(squares.shape[1], USUAL), method="L-BFGS-B").x)
    return shape


def alike(values: Array, stacks: Sequence[str]) -> float:
    """The share of the variance that rows of a stack have in common.

    Between stacks it is the variance of their means, less what the scatter within them makes of it.
    """
    names, places = np.unique(np.asarray(stacks), return_inverse=True)
    counts = np.bincount(places)
    if len(names) < 2 or len(values) == len(names):
        return 0.0
    means = np.bincount(places, values) / counts
    within = float(((values - means[places]) ** 2).sum() / (len(values) - len(names)))
    between = max(float(means.var(ddof=1) - (within / counts).mean()), 0.0)
    return between / max(between + within, 1e-12)


def weights_of(stacks: Sequence[str], common: float) -> Array:
    """Of rows, adding up to 1, where rows of a stack have so much of their variance in common."""
    names, places = np.unique(np.asarray(stacks), return_inverse=True)
    weights: Array = 1 / (1 + (np.bincount(places, minlength=len(names))[places] - 1) * common)
    return weights / weights.sum()


def quantile(values: Array, weights: Array, share: float) -> float:
    """The value below which so much of the weight lies."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(below, share)])


def is_inside(deviations: Array, told: Known, found: Spread) -> Array:
    """Whether each row lies within its interval."""
    width = found.upwards(told.traffic, told.is_open, told.is_mixture)
    return (deviations <= width) & (deviations >= -found.below * width)


def covered(deviations: Array, stacks: Sequence[str], told: Known) -> Array:
    """Whether each row lies in the interval that the other stacks' residuals give it."""
    names, inside = np.asarray(stacks), np.zeros(len(deviations), dtype=bool)
    for stack in dict.fromkeys(stacks):
        mine = names == stack
        found = spread(deviations[~mine], [name for name in stacks if name != stack], told.where(~mine))
        inside[mine] = is_inside(deviations[mine], told.where(mine), found)
    return inside

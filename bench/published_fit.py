"""Fit: the constants drawn towards the published runs, each as far as its spread allows.

Least squares of the logarithm of predicted over published seconds, with a loss that forgives outliers, plus each
constant's distance from what it was before. Sources weigh by the square root of their rows or less, so that the largest
table does not decide alone; plans with an unstated parameter weigh less than whole ones, rounded figures nothing.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from scipy.optimize import least_squares

from bench.published_rows import Row, number
from bench.published_steps import Steps
from superstep.cost.closed.efficiency import CONSTANTS, FITTED
from superstep.hardware.units import Array

NOISE = 0.05
"""Of one row: the same configuration published again differs by 1.5 to 7.5%."""
OUTLIER = 0.15
TRUST = {"A": 1.0, "B": 0.35}


def fit(steps: Steps, keep: Array | None = None) -> dict[str, float]:
    """The constants' values after the fit to those rows of ``keep`` that are trusted."""
    kept = np.ones(len(steps.rows), dtype=bool) if keep is None else keep
    weights = _weights(steps.rows) * kept
    published = np.log([number(row, "step_time_s") for row in steps.rows])
    names = list(CONSTANTS)
    before = np.log([CONSTANTS[name].before for name in names])
    spread = np.array([CONSTANTS[name].spread for name in names])
    used = weights > 0

    def residuals(change: Array) -> Array:
        values = dict(zip(names, np.exp(before + spread * change), strict=True))
        error = np.log(steps.seconds(FITTED.changed(values))) - published
        return np.concatenate([weights[used] * OUTLIER / NOISE * np.arctan(error[used] / OUTLIER), change])

    found = least_squares(residuals, np.zeros(len(names)), method="trf", max_nfev=12, diff_step=1e-2)
    return dict(zip(names, (float(value) for value in np.exp(before + spread * found.x)), strict=True))


def _weights(rows: list[Row]) -> Array:
    counts = Counter(row["leak_group"] for row in rows)
    trusted = np.array([TRUST.get(row["trust"], 0.0) * (row["arch"] != "hybrid") for row in rows])
    usable = np.array([not row["kind"].startswith("lora") for row in rows])
    each: Array = np.array([counts[row["leak_group"]] ** -0.35 for row in rows]) * trusted * usable
    return each / np.sqrt(np.mean(each[each > 0] ** 2)) * 0.6

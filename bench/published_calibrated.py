"""One calibration row: how near other rows of a stack come once one of them was seen, and how much narrower they are.

A row moves the constants as ``planner.calibrate_row`` says, from the values and the errors that they have without its
stack. Every other row of one source, software and chip is the one that is seen in turn (*any*); or the one whose plan
is most alike, as somebody would choose it (*alike*); or one for all, in the middle of their plans (*middle*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.published_fit import Slopes, refit
from bench.published_interval import quantile
from bench.published_rows import Row, degrees, number
from bench.published_score import Scored, is_judged
from superstep.cost.closed.constants import CONSTANTS
from superstep.hardware.units import Array
from superstep.planner.calibrate_row import believed, narrowing, variances_of

Choice = Literal["any", "middle", "alike"]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Every judged row after a row was seen; one for each pair, which weighs so that a row's pairs weigh as one.

    Attributes:
        errors: relative.
        deviations: logarithms of true over predicted seconds.
        narrowed: what the rule leaves of the interval's width.
        rows: the places of the rows.
    """

    errors: Array
    deviations: Array
    narrowed: Array
    weights: Array
    rows: Array

    @property
    def summary(self) -> tuple[int, float, float]:
        """Rows, median and 90th percentile of the error."""
        median, ninth = (quantile(self.errors, self.weights, share) for share in (0.5, 0.9))
        return len(set(self.rows.tolist())), median, ninth


def calibrated(out: Scored, near: Slopes, choice: Choice) -> Calibrated:
    """The judged rows of stacks that were left out, each after one other row of it."""
    logs = np.log(out.predicted_s / out.published_s)
    spreads = np.array([constant.spread for constant in CONSTANTS.values()])
    slopes = near.slopes / spreads
    plans = _plans(out.rows)
    parts: list[tuple[Array, ...]] = []
    for places in _groups(out.rows):
        group = out.rows[places[0]]["leak_group"]
        found = refit(near, near.stacks != group)
        variances = variances_of({name: each.error for name, each in found.items()})
        target, seen = _pairs(plans[places], choice)
        i, j = places[target], places[seen]
        gains = believed(slopes[j], variances)
        left = logs[i] - (gains * slopes[i]).sum(axis=1) * np.where(i == j, 0.0, logs[j])
        width = np.where(i == j, 1.0, narrowing(slopes[j], slopes[i], variances))
        parts.append((left, width, 1 / np.bincount(target, minlength=len(places))[target], i))
    left, width, weights, rows = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Calibrated(np.abs(np.expm1(left)), -left, width, weights, rows.astype(int))


def _groups(rows: Sequence[Row]) -> list[Array]:
    found: dict[tuple[str, str, str], list[int]] = {}
    for place, row in enumerate(rows):
        if is_judged(row):
            found.setdefault((row["source"], row["framework"], row["gpu"]), []).append(place)
    return [np.array(places) for places in found.values()]


def _plans(rows: Sequence[Row]) -> Array:
    """What makes two plans alike, in doublings."""
    sizes = [
        (*degrees(row)[1:], number(row, "n_gpus", 1), number(row, "seq_len", 1), number(row, "hidden", 1),
         max(number(row, "mbs", 1), 1) * number(row, "seq_len", 1), 4.0 ** row["recompute"].startswith("full"),
         4.0 ** (number(row, "zero_stage") == 3), 4.0 ** ("8" in row["precision"]))
        for row in rows
    ]  # fmt: skip
    return np.log2(np.array(sizes, dtype=float))


def _pairs(plans: Array, choice: Choice) -> tuple[Array, Array]:
    """Rows and the row that was seen of each; a lone row sees none."""
    count = len(plans)
    everyone = np.arange(count)
    if count == 1:
        return everyone, everyone
    apart = np.sqrt(((plans[:, None] - plans[None]) ** 2).sum(axis=-1))
    match choice:
        case "any":
            return np.nonzero(~np.eye(count, dtype=bool))
        case "middle":
            middle = int(np.argmin(apart.sum(axis=1)))
            others = everyone[everyone != middle]
            return others, np.full(count - 1, middle)
        case "alike":
            return everyone, np.argmin(apart + np.diag(np.full(count, np.inf)), axis=1)

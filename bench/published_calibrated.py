"""One calibration row: how near other rows of a stack come once one of them was seen, and how much narrower they are.

A row moves the constants as ``planner.calibration.calibrate_observation`` says, from the values and the errors that
they have without its stack. Every other row of one source, software and chip is the one that is seen in turn (*any*);
or the one whose plan is most alike, as somebody would choose it (*alike*); or one for all, in the middle of their plans
(*middle*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.published_fit import Slopes, refit
from bench.published_interval import Known, quantile
from bench.published_rows import Row, degrees, number
from bench.published_score import Scored, is_judged
from superstep.cost.closed.constants import CONSTANTS
from superstep.cost.closed.uncertainty import STEP
from superstep.hardware.units import Array
from superstep.planner.calibration.calibrate_observation import NOISE, belief, variances_of

Choice = Literal["any", "middle", "alike"]
SHARES = np.linspace(-0.5, 1.5, 41)
"""Of a row's deviation, tried in hindsight."""


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


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one source, software and chip.

    Attributes:
        places: of the rows.
        deviations: logarithms of predicted over true seconds, before any was seen.
        left: the same, [rows, seen rows].
        narrowed: what is left of the interval's width, likewise.
        plans: what makes two alike.
    """

    places: Array
    deviations: Array
    left: Array
    narrowed: Array
    plans: Array


def calibrated(tables: Sequence[Table], choice: Choice) -> Calibrated:
    """The rows of tables, each after one other row of its table."""
    parts: list[tuple[Array, ...]] = []
    for table in tables:
        target, seen = _pairs(table.plans, choice)
        is_lone = target == seen
        left = np.where(is_lone, table.deviations[target], table.left[target, seen])
        width = np.where(is_lone, 1.0, table.narrowed[target, seen])
        weights = 1 / np.bincount(target, minlength=len(table.places))[target]
        parts.append((left, width, weights, table.places[target]))
    left, width, weights, rows = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Calibrated(np.abs(np.expm1(left)), -left, width, weights, rows.astype(int))


def held(found: Calibrated, told: Known) -> float:
    """The share of the rows that lie within their narrowed intervals; ``told`` is known of all rows."""
    of_rows = told.where(found.rows)
    width = found.narrowed * STEP.upwards(of_rows.traffic, of_rows.is_open, of_rows.is_mixture)
    is_inside = (found.deviations <= width) & (found.deviations >= -STEP.below * width)
    return float(found.weights @ is_inside / found.weights.sum())


@dataclass(frozen=True, slots=True)
class Drawn:
    """The median error after the row in the middle, over random halves of each table: their mean, and 10 to 90%."""

    mean: float
    low: float
    high: float


def of_halves(tables: Sequence[Table], draws: int = 400) -> Drawn:
    """How much hangs on which row is in the middle: it is another one of each half of a table."""
    tables = [table for table in tables if len(table.places) > 1]
    draw = np.random.default_rng(0)
    medians = []
    for _ in range(draws):
        errors = []
        for table in tables:
            count = len(table.places)
            half = np.sort(draw.choice(count, max(2, (count + 1) // 2), replace=False))
            target, seen = _pairs(table.plans[half], "middle")
            errors.append(np.abs(np.expm1(table.left[half[target], half[seen]])))
        medians.append(np.median(np.concatenate(errors)))
    low, high = np.quantile(medians, (0.1, 0.9))
    return Drawn(float(np.mean(medians)), float(low), float(high))


def in_hindsight(tables: Sequence[Table]) -> float:
    """The median error after any row, where each table takes off the share of the row's deviation that is best for it.

    No rule that scales a table by one row of it comes nearer: it would have to know this share beforehand.
    """
    errors, weights = [], []
    for table in tables:
        target, seen = _pairs(table.plans, "any")
        before, of_seen = table.deviations[target], np.where(target == seen, 0.0, table.deviations[seen])
        tried = [np.abs(np.expm1(before - share * of_seen)) for share in SHARES]
        errors.append(min(tried, key=np.median))
        weights.append(1 / np.bincount(target, minlength=len(table.places))[target])
    return quantile(np.concatenate(errors), np.concatenate(weights), 0.5)


def tables_of(out: Scored, near: Slopes) -> list[Table]:
    """The judged rows of stacks that were left out, and what each tells of the others of its table."""
    logs = np.log(out.predicted_s / out.published_s)
    spreads = np.array([constant.spread for constant in CONSTANTS.values()])
    plans, found = _plans(out.rows), []
    for places in _groups(out.rows):
        without = refit(near, near.stacks != out.rows[places[0]]["leak_group"])
        variances = variances_of({name: each.error for name, each in without.items()})
        slopes, deviations = near.slopes[places] / spreads, logs[places]
        # Of each seen row, what it tells of each other: [rows, seen rows].
        share = slopes @ belief(slopes, variances).T
        narrowed = np.stack([narrowing(one, slopes, variances) for one in slopes], axis=1)
        found.append(Table(places, deviations, deviations[:, None] - share * deviations, narrowed, plans[places]))
    return found


def narrowing(observed: Array, others: Array, variances: Array) -> Array:
    """The remaining width of others' intervals."""
    k = (variances * observed * others).sum(axis=-1)
    own, of_others = ((variances * each**2).sum(axis=-1) + NOISE**2 for each in (observed, others))
    left: Array = np.sqrt(1 - k**2 / (own * of_others))
    return left


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
            target, seen = np.nonzero(~np.eye(count, dtype=bool))
            return target, seen
        case "middle":
            middle = int(np.argmin(apart.sum(axis=1)))
            others = everyone[everyone != middle]
            return others, np.full(count - 1, middle)
        case "alike":
            return everyone, np.argmin(apart + np.diag(np.full(count, np.inf)), axis=1)

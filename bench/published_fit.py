"""Fit: the constants drawn towards the published runs, each as far as its spread allows.

Least squares of the logarithm of predicted over published seconds, with a loss that forgives outliers, plus each
constant's distance from what it was before. Stacks weigh by the square root of their rows or less, so that the largest
table does not decide alone; plans with an unstated parameter weigh less than whole ones, rounded figures nothing. A
constant on which one stack alone bears is held twice as tightly: nobody has seen it anywhere else.

The logarithm of a step's seconds is nearly linear in those of the constants, so a fit without some rows has the slopes
of the fit on all rows. Slopes tell what plans depend on, and nothing of the seconds that were published.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from bench.published_rows import Row, number
from bench.published_steps import Steps
from superstep.cost.closed.constants import CONSTANTS
from superstep.cost.closed.efficiency import FITTED
from superstep.hardware.units import Array

NOISE = 0.05
"""Of one row: the same configuration published again differs by 1.5 to 7.5%."""
OUTLIER = 0.15
TRUST = {"A": 1.0, "B": 0.35}
ROUNDS = 4
STEP = 1e-2
BEARS = 2e-3
"""A row bears on a constant where one spread of it moves the row's seconds by so much."""
ALONE = 0.9
"""A constant rests on one stack if so much of what is known of it comes from there."""
SHRUNK = 2.0


@dataclass(frozen=True, slots=True)
class Slopes:
    """Steps near some values of the constants.

    Attributes:
        at: the constants, in spreads from what they were before.
        errors: logarithms of predicted over published seconds there, a row each.
        slopes: of these, [rows, constants].
        weights: of the rows.
        stacks: whose rows they are.
    """

    at: Array
    errors: Array
    slopes: Array
    weights: Array
    stacks: np.ndarray[tuple[int], np.dtype[np.str_]]


@dataclass(frozen=True, slots=True)
class Estimated:
    """One constant after a fit.

    Attributes:
        value: the estimate.
        error: the standard deviation of its logarithm.
        rows, stacks: that bear on it: ``BEARS`` tells how much.
        is_alone: whether it rests on one of these stacks.
    """

    value: float
    error: float
    rows: int
    stacks: tuple[str, ...]
    is_alone: bool


def fit(steps: Steps) -> tuple[dict[str, Estimated], Slopes]:
    """The constants after the fit to those rows that are trusted, and the slopes there."""
    at = np.zeros(len(CONSTANTS))
    for _ in range(ROUNDS):
        near = slopes_of(steps, at)
        at = _solved(near, np.ones(len(near.errors), dtype=bool))
    near = slopes_of(steps, at)
    return estimated(near, at, np.ones(len(near.errors), dtype=bool)), near


def refit(near: Slopes, keep: Array) -> dict[str, Estimated]:
    """The constants from some of the rows, by the slopes of all."""
    return estimated(near, _solved(near, keep), keep)


def slopes_of(steps: Steps, at: Array) -> Slopes:
    """One step of every constant in turn."""
    published = np.log([number(row, "step_time_s") for row in steps.rows])

    def errors(place: Array) -> Array:
        found: Array = np.log(steps.seconds(FITTED.with_changes(_values(place)))) - published
        return found

    here = errors(at)
    columns = [(errors(at + STEP * one) - here) / STEP for one in np.eye(len(CONSTANTS))]
    stacks = np.array([row["leak_group"] for row in steps.rows])
    return Slopes(at, here, np.stack(columns, axis=1), _weights(steps.rows), stacks)


def estimated(near: Slopes, at: Array, keep: Array) -> dict[str, Estimated]:
    """What is known of each constant."""
    found, values = {}, _values(at)
    known, alone = _information(near, keep), _alone(near, keep)
    spread = np.sqrt(np.diag(np.linalg.inv(known + np.diag(_held(alone) ** 2))))
    bears = (np.abs(near.slopes) > BEARS) & (keep & (near.weights > 0))[:, None]
    for place, name in enumerate(CONSTANTS):
        own = bears[:, place]
        stacks = tuple(dict.fromkeys(near.stacks[own].tolist()))
        error = float(spread[place] * CONSTANTS[name].spread)
        found[name] = Estimated(values[name], error, int(own.sum()), stacks, bool(alone[place]))
    return found


def table(found: dict[str, Estimated]) -> str:
    """The lines of ``cost.closed.constants``."""
    return "".join(_line(name, each) for name, each in found.items())


def _line(name: str, found: Estimated) -> str:
    constant = CONSTANTS[name]
    start = f"{constant.before:g}, {constant.spread:g}"
    if not found.rows:
        return f'    "{name}": Constant({constant.before:g}, {start}),\n'
    alone = ", is_alone=True" if found.is_alone else ""
    bearing = f"error={found.error:.2g}, rows={found.rows}, stacks={found.stacks!r}"
    return f'    "{name}": Constant({found.value:.4g}, {start}, {bearing}{alone}),\n'


def _values(at: Array) -> dict[str, float]:
    """Shares are at most 1."""
    values = {}
    for (name, constant), change in zip(CONSTANTS.items(), at, strict=True):
        value = float(constant.before * np.exp(constant.spread * change))
        values[name] = min(value, 1.0) if constant.before < 1 and not name.endswith("_s") else value
    return values


def _scale(near: Slopes, errors: Array, keep: Array) -> Array:
    """Of each row in the fit: less the farther it is from what is predicted."""
    scale: Array = keep * near.weights / NOISE / (1 + (errors / OUTLIER) ** 2)
    return scale


def _information(near: Slopes, keep: Array) -> Array:
    bent = near.slopes * _scale(near, near.errors, keep)[:, None]
    known: Array = bent.T @ bent
    return known


def _alone(near: Slopes, keep: Array) -> Array:
    """Whether each constant rests on one stack."""
    each = (near.slopes * _scale(near, near.errors, keep)[:, None]) ** 2
    by_stack = np.array([each[near.stacks == stack].sum(axis=0) for stack in dict.fromkeys(near.stacks.tolist())])
    alone: Array = by_stack.max(axis=0) > ALONE * np.maximum(by_stack.sum(axis=0), 1e-9)
    return alone


def _held(alone: Array) -> Array:
    return np.where(alone, SHRUNK, 1.0)


def _solved(near: Slopes, keep: Array) -> Array:
    """The constants at which the loss is least, with the slopes as they are."""
    at, held = near.at.copy(), _held(_alone(near, keep))
    for _ in range(30):
        errors = near.errors + near.slopes @ (at - near.at)
        scale = _scale(near, errors, keep)
        bent = keep * near.weights * OUTLIER / NOISE * np.arctan(errors / OUTLIER)
        rows = np.concatenate([near.slopes * scale[:, None], np.diag(held)])
        wanted = np.concatenate([bent, held * at])
        change = np.linalg.lstsq(rows, -wanted, rcond=None)[0]
        at = at + np.clip(change, -0.5, 0.5)
        if np.abs(change).max() < 1e-3:
            break
    return at


def _weights(rows: list[Row]) -> Array:
    counts = Counter(row["leak_group"] for row in rows)
    trusted = np.array([TRUST.get(row["trust"], 0.0) for row in rows])
    usable = np.array([not row["kind"].startswith("lora") for row in rows])
    each: Array = np.array([counts[row["leak_group"]] ** -0.35 for row in rows]) * trusted * usable
    return each / np.sqrt(np.mean(each[each > 0] ** 2)) * 0.6

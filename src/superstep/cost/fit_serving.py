"""Fits a machine's seconds of each kind of work to measured steps of its server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from superstep.cost.serve import KNOTS, TERMS, ComputeMode, RankModelSize, StepWork, counts
from superstep.hardware.serving_rate import ServingRate
from superstep.hardware.units import Array

TRIMS, TRIM = 3, 4.0
"""How often outliers are left out before fitting again, and how many times the median error makes one."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    model: RankModelSize
    work: StepWork
    seconds: float


def fit(
    samples: Sequence[MeasuredStep], way: ComputeMode, *, held_bytes: float = 1.0, beside_bytes: float = 0.0
) -> ServingRate:
    """The seconds of each kind of work with the least squares of relative errors on steps; none is negative."""
    wanted = np.array([sample.seconds for sample in samples])
    counted = [counts(sample.model, sample.work, leaves_rows=way.leaves_rows) for sample in samples]
    many = np.stack(counted) / wanted[:, None]
    used = np.abs(many).max(axis=0) > 0
    solved, kept = _solve(many), np.ones(len(samples), dtype=bool)
    for _ in range(TRIMS):  # a step beside which something else ran is no sample
        error = np.abs(many @ solved - 1)
        kept = error <= TRIM * max(float(np.median(error)), 0.01)
        solved = _solve(many[kept])
    off = float(np.median(np.abs(many @ solved - 1)))
    solved = _without_gaps(solved, used)
    term_s = tuple(sorted((term, float(f"{each:.6g}")) for term, each in zip(TERMS, solved, strict=True)))
    return ServingRate(
        way=way.name,
        tp=way.tp,
        block_keys=way.block_keys,
        is_paged=way.is_paged,
        leaves_rows=way.leaves_rows,
        term_s=term_s,
        held_bytes=held_bytes,
        beside_bytes=beside_bytes,
        spread=round(off, 4),
    )


def _solve(many: Array) -> Array:
    """Seconds of each kind; more rows never take less for a weight, so the increases are solved for."""
    first = TERMS.index(f"rows_{KNOTS[0]}")
    steps = many.copy()
    steps[:, first:] = many[:, : first - 1 : -1].cumsum(axis=1)[:, ::-1]
    scale = np.abs(steps).max(axis=0)
    used = scale > 0
    solved = np.zeros(len(TERMS))
    solved[used] = least_squares(steps[:, used] / scale[used], np.ones(len(many))) / scale[used]
    solved[first:] = solved[first:].cumsum()
    return solved


def _without_gaps(solved: Array, used: Array) -> Array:
    """Knots without a near step are interpolated between their neighbours, or grow with the rows after the last."""
    places = [TERMS.index(f"rows_{rows}") for rows in KNOTS]
    known = [(rows, solved[place]) for rows, place in zip(KNOTS, places, strict=True) if used[place]]
    if not known:
        return solved
    out = solved.copy()
    for rows, place in zip(KNOTS, places, strict=True):
        if not used[place]:
            last_rows, last_s = known[-1]
            between = float(np.interp(rows, [r for r, _ in known], [s for _, s in known]))
            out[place] = last_s * rows / last_rows if rows > last_rows else between
    return out


def least_squares(many: Array, wanted: Array) -> Array:
    """The x without a negative number for which ``many @ x`` is nearest to ``wanted`` (Lawson 1974, ch. 23)."""
    count = many.shape[1]
    solution, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        slope = many.T @ (wanted - many @ solution)
        slope[free] = -math.inf
        best = int(slope.argmax())
        if slope[best] <= 1e-10:
            break
        free[best] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(many[:, free], wanted, rcond=None)[0]
            if (trial[free] > 0).all():
                break
            # As far towards the trial as no number becomes negative; those that became 0 stay there.
            below = free & (trial <= 0)
            step = float(np.min(solution[below] / np.maximum(solution[below] - trial[below], 1e-300)))
            solution = solution + step * (trial - solution)
            free &= solution > 1e-15
            solution[~free] = 0.0
            if not free.any():
                break
        solution = trial if free.any() else solution
    return solution

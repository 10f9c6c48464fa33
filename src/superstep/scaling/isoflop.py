"""Approaches 1 and 2 of Hoffmann 2022, which read N_opt ~ C^a and D_opt ~ C^b off the losses without a law of them; and
Kaplan's laws of size alone and of tokens alone, from the best runs of each.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from superstep.errors import ConfigError
from superstep.hardware.units import Array
from superstep.scaling.laws import PowerFrontier, PowerLaw
from superstep.scaling.runs import PointColumns, TrainingRun, keep_last_points, table

BUDGETS_OF_ENVELOPE = 400
"""Points of the grid of FLOPs; Hoffmann takes 1,500 over 9 powers of ten."""
SAME_BUDGET = 1.1
"""Runs within this factor of each other's FLOPs share a budget."""
LEAST = 3
LEAST_RANGE = 3.0
"""From the least budget to the largest."""
LARGEST_EXPONENT = 600.0
"""The largest exponent of e that a float holds."""
LEAST_SLOPE = 0.005
"""Of log L; below it the scale of a power law exceeds all numbers."""


def fit_envelope(runs: Sequence[TrainingRun]) -> PowerFrontier:
    """Approach 1: for each budget, the size with the lowest training curve there (Hoffmann 2022, section 3.1).

    Budgets where the smallest or the largest size is lowest are left out, as a size beyond might be lower. Tokens are
    read off the lowest curve.

    Raises:
        ConfigError: fewer than 3 sizes, beside the smallest and the largest, are lowest anywhere.
    """
    curves = _curves(runs)
    sizes = sorted({size for size, _ in curves})
    if len(sizes) < LEAST:
        raise ConfigError(
            f"{len(sizes)} sizes with curves of two points or more are too few for an envelope; give at least 5."
        )
    low = min(curve.flops[0] for _, curve in curves)
    high = max(curve.flops[-1] for _, curve in curves)
    budgets = np.geomspace(low, high, BUDGETS_OF_ENVELOPE)
    losses = np.stack([_read(budgets, curve, curve.loss) for _, curve in curves])
    losses[np.isnan(losses)] = np.inf
    best = losses.argmin(axis=0)
    params = np.array([size for size, _ in curves])[best]
    is_inner = (params > sizes[0]) & (params < sizes[-1])
    if len(set(params[is_inner])) < LEAST:
        raise ConfigError(
            f"{len(set(params[is_inner]))} sizes are best at some budget, beside the smallest and the largest, and the "
            f"envelope needs {LEAST}; train more sizes between them, or each of them longer."
        )
    tokens = np.array(
        [_read(budgets[i : i + 1], curves[k][1], curves[k][1].tokens)[0] for i, k in enumerate(best) if is_inner[i]]
    )
    return _power(budgets[is_inner], params[is_inner], tokens)


def _curves(runs: Sequence[TrainingRun]) -> list[tuple[float, PointColumns]]:
    """Losses over FLOPs at one size each: every run's own curve, and one through the runs with a single point."""
    own = {run.name: run for run in runs}.values()  # a resampled run again is the same curve
    curves = [(run.params, table([run])) for run in own if len(run.points) > 1]
    lone: defaultdict[float, list[TrainingRun]] = defaultdict(list)
    for run in own:
        if len(run.points) == 1:
            lone[run.params].append(run)
    for size, same in lone.items():
        rows = table(sorted(same, key=lambda run: run.final.flops))
        if len(np.unique(rows.flops)) > 1:
            curves.append((size, rows))
    return sorted(curves, key=lambda curve: (curve[0], float(curve[1].flops[-1])))


def _read(budgets: Array, curve: PointColumns, column: Array) -> Array:
    """A column of a curve at some FLOPs, by linear interpolation of logarithms; NaN outside."""
    at = np.interp(np.log(budgets), np.log(curve.flops), np.log(column), left=np.nan, right=np.nan)
    return np.exp(at)


def fit_isoflop(runs: Sequence[TrainingRun]) -> PowerFrontier:
    """Approach 2: at each budget, the minimum of a parabola of the loss over log N (Hoffmann 2022, section 3.2).

    A budget counts where it has 3 sizes and its parabola's minimum is between them.

    Raises:
        ConfigError: fewer than 3 budgets count.
    """
    minima = [lowest for group in _budgets(runs) if (lowest := _lowest(group)) is not None]
    if len(minima) < LEAST:
        raise ConfigError(
            f"{len(minima)} budgets have 3 sizes or more (final FLOPs within {SAME_BUDGET - 1:.0%}) and the lowest "
            f"loss between them, and {LEAST} are needed; train more sizes for the same FLOPs."
        )
    flops, params, tokens = np.array(minima).T
    return _power(flops, params, tokens)


def _budgets(runs: Sequence[TrainingRun]) -> Iterable[PointColumns]:
    """Final points of each budget with three sizes or more."""
    ordered = sorted(keep_last_points(runs), key=lambda run: run.final.flops)
    group: list[TrainingRun] = []
    for run in [*ordered, None]:
        if group and (run is None or run.final.flops > SAME_BUDGET * group[0].final.flops):
            if len({each.params for each in group}) >= LEAST:
                yield table(group)
            group = []
        if run is not None:
            group.append(run)


def _lowest(group: PointColumns) -> tuple[float, float, float] | None:
    """FLOPs, parameters and tokens at the parabola's minimum; None where that is not between the sizes."""
    n = np.log(group.params)
    middle = n.mean()
    square, slope, _ = np.polyfit(n - middle, group.loss, 2)
    if square <= 0:
        return None
    best = middle - slope / (2 * square)
    if not n.min() < best < n.max():
        return None
    tokens = np.polyval(np.polyfit(n - middle, np.log(group.tokens), 1), best - middle)
    return float(np.exp(np.log(group.flops).mean())), float(np.exp(best)), float(np.exp(tokens))


def _power(flops: Array, params: Array, tokens: Array) -> PowerFrontier:
    """Both power laws, by least squares of the logarithms. Raises ConfigError where the budgets are too similar."""
    if flops.max() < LEAST_RANGE * flops.min():
        raise ConfigError(
            f"the budgets that count span a factor of {flops.max() / flops.min():.3g}, and a power law needs "
            f"{LEAST_RANGE:g}; train for smaller and for larger ones."
        )
    c = np.log(flops)
    middle = float(c.mean())
    a, log_params = np.polyfit(c - middle, np.log(params), 1)
    b, log_tokens = np.polyfit(c - middle, np.log(tokens), 1)
    return PowerFrontier(
        a=float(a),
        b=float(b),
        flops_at=math.exp(middle),
        params_at=math.exp(log_params),
        tokens_at=math.exp(log_tokens),
    )


def fit_size(runs: Sequence[TrainingRun]) -> PowerLaw:
    """Kaplan 2020, eq. 1.1: the least loss of each size; valid where data does not limit. Raises ConfigError where
    there are fewer than 3 sizes.
    """
    return _power_law("N", "sizes", [(run.params, run.final.loss) for run in runs])


def fit_tokens(runs: Sequence[TrainingRun]) -> PowerLaw:
    """Kaplan 2020, eq. 1.2: the least loss of each number of tokens; valid where size does not limit. Raises
    ConfigError where there are fewer than 3 numbers of tokens.
    """
    return _power_law("D", "numbers of tokens", [(run.final.tokens, run.final.loss) for run in runs])


def _power_law(of: str, what: str, points: Sequence[tuple[float, float]]) -> PowerLaw:
    least: dict[float, float] = {}
    for x, loss in points:
        least[x] = min(loss, least.get(x, math.inf))
    # A loss that a smaller x has reached already is that of a run which something else held back.
    kept = [(x, loss) for x, loss in sorted(least.items())]
    best = list(itertools.accumulate((loss for _, loss in kept), min))
    rows = np.log(np.array([row for row, lowest in zip(kept, best, strict=True) if row[1] == lowest]).reshape(-1, 2))
    if len(rows) < LEAST:
        raise ConfigError(f"{len(rows)} {what} have a loss below that of all smaller ones, and a power law needs 3.")
    x, log_loss = rows.T
    slope, at = np.polyfit(x - x.mean(), log_loss, 1)
    if slope > -LEAST_SLOPE:
        raise ConfigError(f"the loss falls over {what} with an exponent of {-slope:.4f} only, which is no power law.")
    exponent = float(x.mean() - at / slope)
    if abs(exponent) > LARGEST_EXPONENT:
        raise ConfigError(f"the loss over {what} falls towards a scale of e^{exponent:.0f}, which is no power law.")
    return PowerLaw(of=of, alpha=float(-slope), scale=math.exp(exponent))

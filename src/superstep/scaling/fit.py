"""Approach 3 of Hoffmann 2022: the constants of a law L(N, D) from the losses of runs.

The law's logarithm is fitted to the losses' logarithm: L-BFGS minimises the sum of Huber losses with delta = 1e-3 from
a grid of starts (eq. 10), and the best is kept. Three things differ, none of which moves the optimum:

- Residuals are in units of delta, so that the optimizer's tolerances work. A mean of losses of 1e-5 ends too early. -
log N and log D are relative to their means, which separates the constants from the exponents. - The starts are shares
of the losses, not fixed numbers, and the worse ones are dropped before L-BFGS.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from scipy.optimize import minimize

from superstep.hardware.units import Array
from superstep.scaling.laws import Hoffmann, Kaplan, Law
from superstep.scaling.runs import TrainingRun, check_spread, table

HUBER_DELTA = 1e-3
"""Of log L (Hoffmann 2022, section D.2): a residual above a thousandth counts linearly, not by its square."""
KEPT_STARTS = 12
EXPONENT = (0.02, 4.0)
"""An exponent near 0 is a law without that term, with a scale beyond all numbers."""
LOG_SHARE, LOG_LOSS = (-12.0, 12.0), (-8.0, 8.0)
"""Bounds of a term's share in the loss, and of the loss that a term alone would give, in the middle of the runs."""
LEAST_POINTS = 6
"""One more than the constants of Hoffmann's law."""

L = TypeVar("L", bound=Law)


@dataclass(frozen=True, slots=True)
class FitData:
    """The fitted points: log N and log D relative to their means, and log L, [points] each."""

    n: Array
    d: Array
    log_loss: Array
    mean_n: float
    mean_d: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LawForm(Generic[L]):
    """A law as the optimizer sees it.

    Attributes:
        predict: log L and its derivatives by the constants, [points] and [constants, points].
        bounds: of each constant.
        starts: the grid.
        law, constants: from the optimizer's constants and back.
    """

    predict: Callable[[Array, FitData], tuple[Array, Array]]
    bounds: tuple[tuple[float | None, float | None], ...]
    starts: Callable[[FitData], list[Array]]
    law: Callable[[Array, FitData], L]
    constants: Callable[[L, FitData], Array]


def fit(form: LawForm[L], runs: Sequence[TrainingRun], start: L | None = None) -> L:
    """The law of a form with the best fit to every point of the runs; only from ``start`` where one is given. Raises
    ConfigError where the runs are too few or too alike.
    """
    check_spread(runs, least_points=LEAST_POINTS)
    data = _data(runs)
    if start is not None:
        starts = [form.constants(start, data)]
    else:
        starts = sorted(form.starts(data), key=lambda each: _objective(each, form, data)[0])[:KEPT_STARTS]
    ends = [
        minimize(
            _objective, each, args=(form, data), jac=True, method="L-BFGS-B", bounds=form.bounds,
            options={"maxiter": 3000, "maxfun": 6000, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-7},
        )
        for each in starts
    ]  # fmt: skip
    return form.law(min(ends, key=lambda end: float(end.fun)).x, data)


def residuals(law: Law, runs: Sequence[TrainingRun]) -> Array:
    """The logarithm of each point's loss over the law's, [points]."""
    return np.array([math.log(p.loss / law.loss(run.params, p.tokens)) for run in runs for p in run.points])


def _data(runs: Sequence[TrainingRun]) -> FitData:
    rows = table(runs)
    n, d = np.log(rows.params), np.log(rows.tokens)
    return FitData(n - n.mean(), d - d.mean(), np.log(rows.loss), float(n.mean()), float(d.mean()))


def _objective(constants: Array, form: LawForm[L], data: FitData) -> tuple[float, Array]:
    """The sum of Huber losses, in units of delta squared, and its gradient."""
    predicted, slopes = form.predict(constants, data)
    far = (predicted - data.log_loss) / HUBER_DELTA
    near = np.clip(far, -1, 1)
    return float((near * (far - near / 2)).sum()), slopes @ near / HUBER_DELTA


def _log_sum(terms: Array) -> tuple[Array, Array]:
    """The logarithm of a sum over the first dim, given as logarithms, and each term's share of it."""
    most = terms.max(axis=0)
    shares = np.exp(terms - most)
    total = shares.sum(axis=0)
    return most + np.log(total), shares / total


def _predict_hoffmann(constants: Array, data: FitData) -> tuple[Array, Array]:
    e, a, b, alpha, beta = constants
    terms = np.stack([np.full_like(data.n, e), a - alpha * data.n, b - beta * data.d])
    log_loss, shares = _log_sum(terms)
    return log_loss, np.concatenate([shares, [-shares[1] * data.n, -shares[2] * data.d]])


def _hoffmann_starts(data: FitData) -> list[Array]:
    """E from a tenth of the least loss up, with the rest of the middle loss divided between size and data."""
    least, middle = float(np.exp(data.log_loss.min())), float(np.exp(np.median(data.log_loss)))
    exponents = (0.1, 0.3, 0.5, 0.8, 1.2)
    return [
        np.array([math.log(E), math.log((middle - E) * share), math.log((middle - E) * (1 - share)), alpha, beta])
        for E in (least * part for part in (0.1, 0.4, 0.7, 0.9))
        for share in (0.2, 0.5, 0.8)
        for alpha, beta in itertools.product(exponents, repeat=2)
    ]


def _hoffmann_law(constants: Array, data: FitData) -> Hoffmann:
    e, a, b, alpha, beta = constants.tolist()
    return Hoffmann(
        E=math.exp(e),
        A=math.exp(a + alpha * data.mean_n),
        B=math.exp(b + beta * data.mean_d),
        alpha=alpha,
        beta=beta,
    )


def _hoffmann_constants(law: Hoffmann, data: FitData) -> Array:
    a = math.log(law.A) - law.alpha * data.mean_n
    b = math.log(law.B) - law.beta * data.mean_d
    return np.array([math.log(law.E), a, b, law.alpha, law.beta])


HOFFMANN: LawForm[Hoffmann] = LawForm(
    predict=_predict_hoffmann,
    bounds=(LOG_SHARE, LOG_SHARE, LOG_SHARE, EXPONENT, EXPONENT),
    starts=_hoffmann_starts,
    law=_hoffmann_law,
    constants=_hoffmann_constants,
)


def _predict_kaplan(constants: Array, data: FitData) -> tuple[Array, Array]:
    """log L = alpha_D · log(exp(u) + exp(v)), with u = (p - alpha_N·n) / alpha_D and v = q / alpha_D - d.

    p and q are log L in the middle of the runs for size or for data alone.
    """
    alpha_d, alpha_n, p, q = constants
    u, v = (p - alpha_n * data.n) / alpha_d, q / alpha_d - data.d
    log_sum, (of_u, of_v) = _log_sum(np.stack([u, v]))
    by_alpha_d = log_sum - of_u * u - of_v * q / alpha_d
    return alpha_d * log_sum, np.stack([by_alpha_d, -of_u * data.n, of_u, of_v])


def _kaplan_starts(data: FitData) -> list[Array]:
    """The middle loss, divided between size and data within the power."""
    middle = float(np.median(data.log_loss))
    return [
        np.array([alpha_d, s * alpha_d, middle + alpha_d * math.log(share), middle + alpha_d * math.log(1 - share)])
        for alpha_d in (0.03, 0.06, 0.1, 0.2, 0.4)
        for s in (0.3, 0.6, 1.0, 1.7)
        for share in (0.05, 0.2, 0.5, 0.8, 0.95)
    ]


def _kaplan_law(constants: Array, data: FitData) -> Kaplan:
    alpha_d, alpha_n, p, q = constants.tolist()
    return Kaplan(
        alpha_n=alpha_n,
        alpha_d=alpha_d,
        n_c=math.exp(p / alpha_n + data.mean_n),
        d_c=math.exp(q / alpha_d + data.mean_d),
    )


def _kaplan_constants(law: Kaplan, data: FitData) -> Array:
    p = law.alpha_n * (math.log(law.n_c) - data.mean_n)
    q = law.alpha_d * (math.log(law.d_c) - data.mean_d)
    return np.array([law.alpha_d, law.alpha_n, p, q])


KAPLAN: LawForm[Kaplan] = LawForm(
    predict=_predict_kaplan,
    bounds=(EXPONENT, EXPONENT, LOG_LOSS, LOG_LOSS),
    starts=_kaplan_starts,
    law=_kaplan_law,
    constants=_kaplan_constants,
)

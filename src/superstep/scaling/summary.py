"""All fits of a set of runs, with their intervals.

    runs ──► study ──► Study: fits, each with the fits of resampled runs
                         │ estimate(fit, quantity)          any number that a law gives: a constant, N_opt, a loss
                         ▼
                       Estimate: the number and its interval

Intervals are by the bootstrap (Efron 1979): samples of the runs with replacement, of the same size. They cover other
runs of the same kind, and do not say whether the law holds beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np

from superstep.errors import ConfigError
from superstep.scaling.fit import HOFFMANN, KAPLAN, fit
from superstep.scaling.isoflop import fit_envelope, fit_isoflop, fit_size, fit_tokens
from superstep.scaling.laws import FLOPS_PER_PARAMETER_AND_TOKEN, Hoffmann, Kaplan, PowerFrontier, PowerLaw
from superstep.scaling.runs import TrainingRun, keep_last_points

LEVEL = 0.9
"""The share of resampled fits within an interval."""
TRUSTED_FACTOR = 10.0
"""How far beyond the largest run a law is used without a warning."""

Points = Literal["final", "all"]
F = TypeVar("F")
Fitted = Callable[[Sequence[TrainingRun], F | None], F]
"""Fits a law to runs, starting from another law or from none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(Generic[F]):
    """A law, and the same fit of resampled runs.

    Resamples that do not allow the fit are left out; if these are the majority, all are.
    """

    law: F
    resampled: tuple[F, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedNumber:
    """A number with its interval; None without resamples."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Every fit that the runs allow, None for the others.

    Attributes:
        hoffmann, kaplan: laws of size and tokens.
        envelope, isoflop: frontiers, by approaches 1 and 2 of Hoffmann 2022.
        size, tokens: Kaplan's laws of one variable.
        missing: why a fit could not be made, by the names above.
    """

    runs: tuple[TrainingRun, ...]
    points: Points
    resamples: int
    seed: int
    hoffmann: Fit[Hoffmann] | None
    kaplan: Fit[Kaplan] | None
    envelope: Fit[PowerFrontier] | None
    isoflop: Fit[PowerFrontier] | None
    size: Fit[PowerLaw] | None
    tokens: Fit[PowerLaw] | None
    missing: Mapping[str, str]


def study(runs: Sequence[TrainingRun], *, points: Points = "final", resamples: int, seed: int) -> Study:
    """Fit every law to the runs, and to resampled runs.

    ``points`` selects the points for the laws of the loss: with a decaying learning rate, losses before a run's end are
    too high; the envelope uses them anyway, as Hoffmann's does.

    Raises:
        ConfigError: the runs allow no fit at all.
    """
    missing: dict[str, str] = {}

    def try_fit(name: str, fitted: Fitted[F]) -> Fit[F] | None:
        try:
            return bootstrap(runs, fitted, resamples=resamples, seed=seed)
        except ConfigError as error:
            missing[name] = str(error)
            return None

    summary = Study(
        runs=tuple(runs),
        points=points,
        resamples=resamples,
        seed=seed,
        hoffmann=try_fit("hoffmann", lambda some, start: fit(HOFFMANN, take_points(some, points), start)),
        kaplan=try_fit("kaplan", lambda some, start: fit(KAPLAN, take_points(some, points), start)),
        envelope=try_fit("envelope", lambda some, _: fit_envelope(some)),
        isoflop=try_fit("isoflop", lambda some, _: fit_isoflop(some)),
        size=try_fit("size", lambda some, _: fit_size(some)),
        tokens=try_fit("tokens", lambda some, _: fit_tokens(some)),
        missing=missing,
    )
    if not (summary.hoffmann or summary.envelope or summary.isoflop):
        raise ConfigError(missing["hoffmann"])
    return summary


def take_points(runs: Sequence[TrainingRun], points: Points) -> Sequence[TrainingRun]:
    """The runs with the points for the laws of the loss."""
    return runs if points == "all" else keep_last_points(runs)


def bootstrap(runs: Sequence[TrainingRun], fitted: Fitted[F], *, resamples: int, seed: int) -> Fit[F]:
    """The fit of the runs, and those of all resamples that allow one, each started from the first. Raises ConfigError
    where the runs themselves do not allow it.
    """
    law = fitted(runs, None)
    rng = np.random.default_rng(seed)
    resampled = []
    for _ in range(resamples):
        with suppress(ConfigError):
            resampled.append(fitted([runs[i] for i in rng.integers(0, len(runs), len(runs))], law))
    return Fit(law=law, resampled=tuple(resampled) if 2 * len(resampled) > resamples else ())


def estimate(fitted: Fit[F], quantity: Callable[[F], float]) -> FittedNumber:
    """A number of a law, with the interval of ``LEVEL`` of the resampled laws' numbers."""
    return _estimate_number(quantity(fitted.law), [quantity(law) for law in fitted.resampled])


def _estimate_number(value: float, resampled: Sequence[float]) -> FittedNumber:
    if not resampled:
        return FittedNumber(value=value, interval=None)
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return FittedNumber(value=value, interval=(float(low), float(high)))


def constants(fitted: Fit[Hoffmann] | Fit[Kaplan] | Fit[PowerFrontier] | Fit[PowerLaw]) -> dict[str, FittedNumber]:
    """The constants of a law, by its paper's names, and a and b of a frontier."""

    def numbers(law: Hoffmann | Kaplan | PowerFrontier | PowerLaw) -> dict[str, float]:
        exponents = {} if isinstance(law, PowerLaw) else {"a": law.a, "b": law.b}
        return dict(law.constants()) | exponents

    columns = {name: [each[name] for each in map(numbers, fitted.resampled)] for name in numbers(fitted.law)}
    return {name: _estimate_number(value, columns[name]) for name, value in numbers(fitted.law).items()}


def beyond(runs: Sequence[TrainingRun], params: float, tokens: float) -> dict[str, float]:
    """The factors by which size, tokens and FLOPs exceed the largest run's, for those beyond ``TRUSTED_FACTOR``."""
    factors = {
        "parameters": params / max(run.params for run in runs),
        "tokens": tokens / max(run.final.tokens for run in runs),
        "FLOPs": FLOPS_PER_PARAMETER_AND_TOKEN * params * tokens / max(run.final.flops for run in runs),
    }
    return {name: factor for name, factor in factors.items() if factor > TRUSTED_FACTOR}

"""The fits, the best model for a budget, and the basis of both: as text, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from superstep.observe.number_format import count_text
from superstep.plan.model.shape import ModelShape
from superstep.scaling.budget import BestUse, BudgetChoice
from superstep.scaling.fit import HUBER_DELTA, residuals
from superstep.scaling.laws import FLOPS_PER_PARAMETER_AND_TOKEN, Law
from superstep.scaling.summary import LEVEL, TRUSTED_FACTOR, Fit, FittedNumber, Study, beyond, constants, take_points

TITLES = {
    "hoffmann": "Hoffmann, L(N, D)",
    "kaplan": "Kaplan, L(N, D)",
    "isoflop": "IsoFLOP parabolas",
    "envelope": "envelope of curves",
    "size": "Kaplan, L(N)",
    "tokens": "Kaplan, L(D)",
}
"""Titles by the names of a study's fits."""
LAWS = ("hoffmann", "kaplan")
"""Fits that give the loss of a size after some tokens."""
WIDE = 0.2
"""Width of the interval of a: a tenfold budget then needs a size with an uncertainty above 1.6 times."""
FIRST, REST = 22, 27
"""Columns of a table, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSummary:
    """Questions to the fits, and the answers.

    Attributes:
        budget: in words; None without one, and then also without the next three.
        choices: of each fit, for the FLOPs of ``best``.
        shape: a decoder of about the best size.
        predicted: the loss at a size and tokens by each law, with both.
    """

    budget: str | None = None
    best: BestUse | None = None
    choices: Mapping[str, BudgetChoice] = dataclasses.field(default_factory=dict)
    shape: ModelShape | None = None
    at: tuple[float, float] | None = None
    predicted: Mapping[str, FittedNumber] = dataclasses.field(default_factory=dict)


def as_text(summary: Study, answers: FitSummary, rests_on: Sequence[str]) -> str:
    """Every table, with its lines."""
    parts = [_runs(summary), *_frontiers(summary), *_laws(summary), *_missing(summary)]
    parts += [*_prediction_lines(answers), *_answer(answers)]
    parts += ["", "rests on", *(f"  {line}" for line in (*_ground(summary), *rests_on))]
    return "\n".join([*parts, *(f"warning: {line}" for line in warnings(summary, answers))]) + "\n"


def warnings(summary: Study, answers: FitSummary) -> list[str]:
    """Reasons to doubt the answers."""
    lines = []
    ratio = float(np.median([run.final.flops / (_by_rule(run.params, run.final.tokens)) for run in summary.runs]))
    if not 0.8 < ratio < 1.25:
        lines.append(
            f"the runs' flops are {ratio:.2f} times 6 N D: the parabolas and the envelope use those flops, the laws "
            "of the loss use 6 N D."
        )
    leading = next(fit for fit in (summary.hoffmann, summary.isoflop, summary.envelope) if fit is not None)
    interval = constants(leading)["a"].interval
    if interval and interval[1] - interval[0] > WIDE:
        lines.append(
            f"the runs do not determine a, the exponent of the best size: it may be anywhere from {interval[0]:.2f} to "
            f"{interval[1]:.2f}; add runs of other sizes and budgets before you rely on the answer."
        )
    targets = [(answers.best.params, answers.best.tokens)] if answers.best else []
    for params, tokens in [*targets, *([answers.at] if answers.at else [])]:
        far = [f"{_times(factor)} its {name}" for name, factor in beyond(summary.runs, params, tokens).items()]
        if far:
            lines.append(
                f"{count_text(params)} parameters and {count_text(tokens)} tokens lie beyond the largest run, at "
                f"{', '.join(far)}; a law is trusted to {TRUSTED_FACTOR:g} times."
            )
    return lines


def _times(factor: float) -> str:
    return f"{factor:.0f} times" if factor < 9999.5 else f"{factor:.1e} times"


def _by_rule(params: float, tokens: float) -> float:
    return FLOPS_PER_PARAMETER_AND_TOKEN * params * tokens


def _runs(summary: Study) -> str:
    runs = summary.runs
    sizes = sorted({run.params for run in runs})
    points = sum(len(run.points) for run in runs)
    tokens, flops = [run.final.tokens for run in runs], [run.final.flops for run in runs]
    losses = [run.final.loss for run in runs]
    curves = f", {points} points" if points > len(runs) else ""
    return (
        f"{len(runs)} runs{curves}: {len(sizes)} sizes from {count_text(sizes[0])} to {count_text(sizes[-1])} "
        f"parameters, {count_text(min(tokens))} to {count_text(max(tokens))} tokens,\n"
        f"{min(flops):.2g} to {max(flops):.2g} FLOPs, final losses {min(losses):.3f} to {max(losses):.3f}"
    )


def _frontiers(summary: Study) -> Iterator[str]:
    yield from ("", _row("best use of C FLOPs", "N_opt ~ C^a, a", "D_opt ~ C^b, b", "error of the losses"))
    for name in ("envelope", "isoflop", "hoffmann", "kaplan"):
        fit = getattr(summary, name)
        if fit is not None:
            of = constants(fit)
            error = f"{error_of(summary, fit.law):.2%}" if name in LAWS else ""
            yield _row(TITLES[name], _cell(of["a"], _thousandths), _cell(of["b"], _thousandths), error)


def error_of(summary: Study, law: Law) -> float:
    """The root mean square of log L over the law's, as a share of the loss."""
    return float(np.sqrt(np.mean(residuals(law, take_points(summary.runs, summary.points)) ** 2)))


_ROWS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("exponent of size", {"hoffmann": "alpha", "kaplan": "alpha_N", "size": "alpha_N"}),
    ("exponent of tokens", {"hoffmann": "beta", "kaplan": "alpha_D", "tokens": "alpha_D"}),
    ("scale of size", {"hoffmann": "A", "kaplan": "N_c", "size": "N_c"}),
    ("scale of tokens", {"hoffmann": "B", "kaplan": "D_c", "tokens": "D_c"}),
    ("loss that stays", {"hoffmann": "E"}),
)


def _laws(summary: Study) -> Iterator[str]:
    columns = (("hoffmann",), ("kaplan",), ("size", "tokens"))
    if not (summary.hoffmann or summary.kaplan):
        return
    yield from ("", _row("constants", TITLES["hoffmann"], TITLES["kaplan"], "Kaplan, L(N) and L(D)"))
    for title, names in _ROWS:
        yield _row(title, *(_constant(summary, names, column) for column in columns))


def _constant(summary: Study, names: Mapping[str, str], column: Sequence[str]) -> str:
    for fit_name in column:
        fit = getattr(summary, fit_name)
        if fit is not None and fit_name in names:
            return _cell(constants(fit)[names[fit_name]], _figure)
    return ""


def _missing(summary: Study) -> Iterator[str]:
    reasons = dict.fromkeys(summary.missing.values())
    if reasons:
        yield ""
    for reason in reasons:
        names = " nor ".join(TITLES[name] for name, why in summary.missing.items() if why == reason)
        yield f"no {names}: {reason}"


def _prediction_lines(answers: FitSummary) -> Iterator[str]:
    if answers.at is None:
        return
    params, tokens = answers.at
    yield from ("", f"loss of {count_text(params)} parameters after {count_text(tokens)} tokens")
    for name, loss in answers.predicted.items():
        yield _row(f"  {TITLES[name]}", _cell(loss, _thousandths))


def _answer(answers: FitSummary) -> Iterator[str]:
    if answers.best is None:
        return
    yield from ("", f"best for {answers.budget}")
    yield _row("", "parameters", "tokens", "loss")
    for name, choice in answers.choices.items():
        loss = _cell(choice.loss, _thousandths) if choice.loss else ""
        yield _row(f"  {TITLES[name]}", _cell(choice.params, _count), _cell(choice.tokens, _count), loss)
    best = answers.best
    end = f", to a loss of {best.loss:.3f}" if best.loss is not None else ""
    yield f"so {count_text(best.params)} parameters on {count_text(best.tokens)} tokens{end}."
    if answers.shape:
        shape = answers.shape
        yield (
            f"As a decoder: {shape.layers} layers, width {shape.width:,}, {shape.heads} heads of {shape.head_dim}, "
            f"{shape.kv_heads} for keys and values, ffn {shape.ffn:,}."
        )


def _ground(summary: Study) -> Iterator[str]:
    yield "C = 6 N D FLOPs; N as the runs count it (of run directories: without embedding and head); L in nats a token"
    which = "every point" if summary.points == "all" else "the final loss of each run"
    yield f"laws: {which}, Huber loss of log L (delta {HUBER_DELTA:g}), L-BFGS; exponents: powers of least squares"
    if summary.resamples:
        drawn = f"{summary.resamples} resamples of the runs, seed {summary.seed}"
        yield f"{LEVEL:.0%} intervals: {drawn}; [-] means that most of them could not be fitted"


def _row(first: str, *cells: str) -> str:
    return (f"{first:{FIRST}}" + "".join(f"{cell:{REST - 1}} " for cell in cells)).rstrip()


def _cell(value: FittedNumber, text: Callable[[float], str]) -> str:
    if value.interval is None:
        return f"{text(value.value)} [-]"
    low, high = value.interval
    return f"{text(value.value)} [{text(low)}, {text(high)}]"


def _thousandths(number: float) -> str:
    return f"{number:.3f}"


def _figure(number: float) -> str:
    """Three digits, and a power of ten instead of more than five."""
    return f"{number:.0f}" if 999.5 <= number < 99950 else f"{number:.3g}".replace("e+", "e")


def _count(number: float) -> str:
    """As ``count_text``; with a power of ten beyond trillions."""
    return count_text(number) if number < 999.5e12 else _figure(number)


def as_json(summary: Study, answers: FitSummary) -> dict[str, Any]:
    """Every number, in base units: parameters, tokens, FLOPs, nats per token."""
    fits = {name: getattr(summary, name) for name in TITLES}
    return {
        "runs": [dataclasses.asdict(run) for run in summary.runs],
        "points": summary.points,
        "resamples": summary.resamples,
        "seed": summary.seed,
        "level": LEVEL,
        "fits": {name: _fit_json(summary, name, fit) for name, fit in fits.items() if fit is not None},
        "not_fitted": dict(summary.missing),
        "budget": answers.budget,
        "best": dataclasses.asdict(answers.best) if answers.best else None,
        "choices": {name: dataclasses.asdict(choice) for name, choice in answers.choices.items()},
        "shape": dataclasses.asdict(answers.shape) if answers.shape else None,
        "predicted": {
            name: {"params": answers.at[0], "tokens": answers.at[1], **dataclasses.asdict(loss)}
            for name, loss in answers.predicted.items()
            if answers.at
        },
        "warnings": warnings(summary, answers),
    }


def _fit_json(summary: Study, name: str, fit: Fit[Any]) -> dict[str, Any]:
    return {
        "title": TITLES[name],
        "constants": {key: dataclasses.asdict(value) for key, value in constants(fit).items()},
        "error": error_of(summary, fit.law) if name in LAWS else None,
        "resampled": len(fit.resampled),
    }

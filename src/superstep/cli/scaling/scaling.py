"""superstep scaling: laws of the loss from a user's runs, and the best model for a budget."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from superstep.cli.flags.options import read_names
from superstep.cli.scaling.plot import plot_svg
from superstep.cli.scaling.runs import read_runs
from superstep.cli.scaling.scaling_text import FitSummary, as_json, as_text
from superstep.errors import ConfigError
from superstep.hardware.catalogue import chip
from superstep.scaling.budget import Throughput, best_for, best_of_flops, choices
from superstep.scaling.model_sizes import LEAST_SHAPE, shape_of
from superstep.scaling.summary import FittedNumber, Study, estimate, study

DESCRIPTION = (
    "Fit laws of the loss by model size and tokens to your runs, and compute the best model for a budget. RUNS are CSV "
    "files with the columns params, tokens, loss (and optionally flops, run), or run directories."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    """Options of the fits."""

    budget_flops: float | None = None
    """Find the best model for this many FLOPs of training, by C = 6 N D."""
    budget: str | None = None
    """Find the best model for this many hours of a chip, as 10000xH100-hours."""
    mfu: float = 0.4
    """With --budget: the share of the chip's peak that training reaches."""
    params: float | None = None
    """Predict the loss of a model with this many parameters, trained for --tokens."""
    tokens: float | None = None
    """Predict the loss after this many tokens, of a model of --params."""
    points: Literal["final", "all"] = "final"
    """Losses of a run for the fits; all is right for a constant learning rate."""
    resamples: int = 200
    """Fits to resampled runs, for the intervals."""
    seed: int = 0
    """The seed of the resampling."""
    json: str | None = None
    """Write every number, in base units, to this file."""
    plot: str | None = None
    """Draw the runs and the law to this file, as SVG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """Device-seconds, their rate of tokens for a model size, and both in words."""

    words: str
    device_s: float
    throughput: Throughput
    rests_on: str


def main(argv: Sequence[str]) -> int:
    """Print the fits, the answer, and the basis of both."""
    words, options = read_names(ScalingOptions(), argv, prog="superstep scaling RUNS", description=DESCRIPTION)
    paths = [Path(word) for word in words]
    if not paths:
        raise ConfigError(
            "no runs are given; name them first, then any flags: superstep scaling runs.csv --budget-flops 1e21."
        )
    _check(options)
    budget = device_budget(options.budget, options.mfu) if options.budget else None
    summary = study(read_runs(paths), points=options.points, resamples=options.resamples, seed=options.seed)
    answers = _with_answers(summary, options, budget)
    print(as_text(summary, answers, [budget.rests_on] if budget else []), end="")
    if options.json:
        _write(Path(options.json), json.dumps(as_json(summary, answers), indent=1) + "\n")
    if options.plot:
        _write(Path(options.plot), plot_svg(summary, answers.best))
    return 0


def _check(options: ScalingOptions) -> None:
    if options.budget and options.budget_flops is not None:
        raise ConfigError("--budget and --budget-flops exclude each other; give one.")
    for name in ("budget_flops", "params", "tokens"):
        value = getattr(options, name)
        if value is not None and not 1 <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} = {value:g} must be a count of at least 1, as 1e21.")
    if (options.params is None) != (options.tokens is None):
        given, other = ("params", "tokens") if options.tokens is None else ("tokens", "params")
        raise ConfigError(f"--{given} predicts a loss, which also depends on --{other}; give both.")
    if not 0 < options.mfu <= 1:
        raise ConfigError(f"--mfu = {options.mfu:g} must be a share of the peak above 0, at most 1; 0.4 is usual.")
    for name, least in (("resamples", 0), ("seed", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} = {getattr(options, name)} must be at least {least}.")
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is not None and not Path(path).parent.is_dir():
            raise ConfigError(f"--{name} = '{path}': the folder {Path(path).parent} is not there; make it first.")


def device_budget(text: str, mfu: float) -> DeviceBudget:
    """The budget ``10000xH100-hours``, at a constant share of the chip's peak.

    Raises:
        ConfigError: it is in other units, of an unknown chip, or not above 0.
    """
    form = "write HOURSxCHIP-hours, as 10000xH100-hours, or give FLOPs by --budget-flops."
    match = re.fullmatch(r"\s*(?P<hours>[0-9.,_]+(?:e\+?[0-9]+)?)\s*[x ]\s*(?P<chip>.+?)[- ]hours?\s*", text)
    if match is None:
        raise ConfigError(f"--budget = '{text}' is not in hours of a chip; {form}")
    try:
        hours = float(match["hours"].replace(",", ""))
    except ValueError:
        raise ConfigError(f"--budget = '{text}': {match['hours']} is not a number; {form}") from None
    if not 0 < hours < math.inf:
        raise ConfigError(f"--budget = '{text}': {match['hours']} hours must be above 0; {form}")
    device = chip(match["chip"], field="--budget")
    peak_flops_per_s = device.peak("bf16") or device.peak("fp16") or device.peak("fp32")
    if peak_flops_per_s is None:
        raise ConfigError(f"--budget = '{text}': the peak of {device.name} is not known; {form}")
    sustained_flops_per_s = mfu * peak_flops_per_s
    return DeviceBudget(
        words=f"{hours:,.10g} hours of {device.name}",
        device_s=hours * 3600,
        throughput=lambda params: sustained_flops_per_s,
        rests_on=f"{device.name} at {mfu:.0%} of {peak_flops_per_s / 1e12:.4g} TFLOP/s for every size (--mfu)",
    )


def _with_answers(summary: Study, options: ScalingOptions, budget: DeviceBudget | None) -> FitSummary:
    answers = FitSummary()
    if options.params is not None and options.tokens is not None:
        answers = replace(answers, at=(options.params, options.tokens), predicted=_predict(summary, options))
    best_fit = summary.hoffmann or summary.isoflop or summary.envelope
    assert best_fit is not None, "a study has one of the three"
    if budget is not None:
        best = best_for(best_fit.law, budget.device_s, budget.throughput)
        assert best is not None, "a constant throughput trains every size"
        words = f"{budget.words}, {best.flops:.3g} FLOPs"
    elif options.budget_flops is not None:
        best = best_of_flops(best_fit.law, options.budget_flops)
        words = f"{best.flops:.3g} FLOPs"
    else:
        return answers
    return replace(
        answers,
        budget=words,
        best=best,
        choices=choices(summary, best.flops),
        shape=shape_of(max(best.params, LEAST_SHAPE)),
    )


def _predict(summary: Study, options: ScalingOptions) -> dict[str, FittedNumber]:
    if summary.hoffmann is None or summary.kaplan is None:
        raise ConfigError(
            f"--params predicts a loss, but no law of the loss can be fitted: {summary.missing['hoffmann']}"
        )
    params, tokens = float(options.params or 0), float(options.tokens or 0)
    return {
        "hoffmann": estimate(summary.hoffmann, lambda law: law.loss(params, tokens)),
        "kaplan": estimate(summary.kaplan, lambda law: law.loss(params, tokens)),
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file.") from error

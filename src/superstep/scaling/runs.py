"""The runs for a scaling law: each one's size, and its loss after some tokens.

    params,tokens,loss              one row for each run, or with the column run, one for each point of its curve
    44e6,1.1e9,3.61
    44e6,2.3e9,3.42

A further column, flops, has a point's cost; 6·N·D where it is left out. Other columns are ignored.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from superstep.errors import ConfigError, did_you_mean
from superstep.hardware.units import Array
from superstep.scaling.laws import FLOPS_PER_PARAMETER_AND_TOKEN

NEEDED = ("params", "tokens", "loss")
MOST_PARAMS, MOST_TOKENS = 1e18, 1e21
"""Larger numbers have a wrong unit."""
MOST_CORRELATED = 0.98
"""Runs with D = 20·N lie on a line: any split of the loss between the two fits them, and predictions are arbitrary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """A run's validation loss, in nats per token, after ``tokens``, at a cost of ``flops``."""

    tokens: float
    loss: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One training run with a unique name; its points are in the order of their tokens."""

    name: str
    params: float
    points: tuple[LossPoint, ...]

    @property
    def final(self) -> LossPoint:
        """After the last token."""
        return self.points[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointColumns:
    """Points of runs as columns, [points] each."""

    params: Array
    tokens: Array
    loss: Array
    flops: Array


def table(runs: Iterable[TrainingRun]) -> PointColumns:
    """Every point of some runs."""
    rows = np.array([(run.params, p.tokens, p.loss, p.flops) for run in runs for p in run.points], dtype=np.float64)
    params, tokens, loss, flops = rows.reshape(-1, 4).T
    return PointColumns(params=params, tokens=tokens, loss=loss, flops=flops)


def keep_last_points(runs: Iterable[TrainingRun]) -> list[TrainingRun]:
    """The same runs with only their last points: with a decaying learning rate, earlier losses are too high."""
    return [TrainingRun(name=run.name, params=run.params, points=run.points[-1:]) for run in runs]


def point_of(where: str, params: float, values: Mapping[str, float]) -> LossPoint:
    """A point from its numbers; FLOPs are 6·N·D where missing. Raises ConfigError where a number is not above 0 or not
    finite, or has a wrong unit.
    """
    flops = values.get("flops", FLOPS_PER_PARAMETER_AND_TOKEN * params * values["tokens"])
    for name, value in (("params", params), *values.items(), ("flops", flops)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{where}: {name} = {value:g} must be above 0 and finite; mend or drop that point.")
    for name, value, most in (("params", params, MOST_PARAMS), ("tokens", values["tokens"], MOST_TOKENS)):
        if not 1 <= value <= most:
            raise ConfigError(f"{where}: {name} = {value:g} is no count; write it in units of one, 7e9 for 7 billion.")
    return LossPoint(tokens=values["tokens"], loss=values["loss"], flops=flops)


def read_csv(path: Path) -> list[TrainingRun]:
    """The runs of a CSV file with the column names in its first line. Raises ConfigError where the file cannot be read,
    lacks a column or a row, or holds something else than numbers.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            names = tuple(name.strip() for name in reader.fieldnames or ())
            reader.fieldnames = names
            _check_columns(path, names)
            rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is no CSV file: {error}.") from error
    runs: dict[str, tuple[float, list[LossPoint]]] = {}
    for line, row in rows:
        where = f"{path}, line {line}"
        values = {name: _number(where, name, row[name]) for name in (*NEEDED, "flops") if name in names}
        params = values.pop("params")
        name = (row.get("run") or "").strip() or f"line {line}"
        size, points = runs.setdefault(name, (params, []))
        if params != size:
            raise ConfigError(
                f"{where}: run '{name}' has params = {params:g}, and {size:g} before; give each run one size."
            )
        points.append(point_of(where, params, values))
    return [run_of(str(path), name, params, points) for name, (params, points) in runs.items()]


def run_of(where: str, name: str, params: float, points: Sequence[LossPoint]) -> TrainingRun:
    """A run from its points in any order. Raises ConfigError where two points have the same number of tokens."""
    ordered = sorted(points, key=lambda point: point.tokens)
    for one, other in itertools.pairwise(ordered):
        if one.tokens == other.tokens:
            raise ConfigError(
                f"{where}: run '{name}' has two losses after {one.tokens:g} tokens; keep one, or name two runs."
            )
    return TrainingRun(name=name, params=params, points=tuple(ordered))


def _check_columns(path: Path, names: Sequence[str]) -> None:
    for name in NEEDED:
        if name not in names:
            hint = did_you_mean(name, names) if names else "."
            hint = hint.replace("did you mean", "is it") if "did you mean" in hint else "."
            raise ConfigError(f"{path} has no column '{name}'{hint} Its first line must name {', '.join(NEEDED)}.")


def _number(where: str, name: str, text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise ConfigError(f"{where}: {name} = '{text or ''}' is not a number; write it as 7000000000 or 7e9.") from None


def check_spread(runs: Sequence[TrainingRun], *, least_points: int) -> None:
    """Check that a law of N and D can be fitted. Raises ConfigError where there are too few points, sizes or numbers of
    tokens, or the two change together.
    """
    points = {(run.name, point.tokens) for run in runs for point in run.points}
    if len(points) < least_points:
        raise ConfigError(
            f"{len(points)} runs are too few for a law of size and tokens; give at least {least_points}, of 3 sizes."
        )
    for name, values, mend in (
        ("params", {run.params for run in runs}, "train models of other sizes"),
        ("tokens", {tokens for _, tokens in points}, "train for other numbers of tokens"),
    ):
        if len(values) < 3 or max(values) < 2 * min(values):
            raise ConfigError(
                f"{name} of the runs has {len(values)} values from {min(values):g} to {max(values):g}; a law needs "
                f"3 that span a factor of 2: {mend}."
            )
    rows = table(runs)
    together = float(np.corrcoef(np.log(rows.params), np.log(rows.tokens))[0, 1])
    if abs(together) > MOST_CORRELATED:
        raise ConfigError(
            f"the correlation of log params and log tokens is {together:.3f}, at most {MOST_CORRELATED} is allowed: "
            "the two change together, so their shares cannot be told apart; add runs that change one alone."
        )

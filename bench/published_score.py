"""Scores: how far predictions are from what was published, how well they order plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.published_memory import hold
from bench.published_rows import Row, degrees, number
from superstep.hardware.units import Array
from superstep.planner.tie_break import Simplicity, first_of, simplicity

STEPS = ("pretrain_step", "sft_step", "lora_step", "layer_fwd_bwd_ms")


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows and what was predicted for them."""

    rows: Sequence[Row]
    published_s: Array
    predicted_s: Array

    @property
    def errors(self) -> Array:
        """Relative."""
        return np.abs(self.predicted_s / self.published_s - 1)

    def where(self, keep: Callable[[Row], bool]) -> Scored:
        """Those rows only."""
        mask = np.array([keep(row) for row in self.rows], dtype=bool)
        kept = [row for row in self.rows if keep(row)]
        return Scored(kept, self.published_s[mask], self.predicted_s[mask])

    def replaced(self, predicted_s: Array) -> Scored:
        """The same rows, predicted otherwise."""
        return Scored(self.rows, self.published_s, predicted_s)


def is_judged(row: Row) -> bool:
    """Complete plans with precise figures."""
    return row["trust"] == "A" and row["kind"] in STEPS


def summary(scored: Scored) -> tuple[int, float, float]:
    """Rows, median and 90th percentile of the error."""
    if not scored.rows:
        return 0, float("nan"), float("nan")
    return len(scored.rows), float(np.median(scored.errors)), float(np.quantile(scored.errors, 0.9))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Plans of one model on one cluster.

    Attributes:
        spearman: rank correlation of predicted and published seconds.
        loss: by how much the plan that a planner takes, of those predicted to be fastest the simplest, is slower than
            the fastest published one.
        fastest_loss: the same of the one that is predicted to be fastest.
    """

    name: str
    plans: int
    spearman: float
    loss: float
    fastest_loss: float


def ranked(scored: Scored) -> list[Sweep]:
    """Every sweep of four or more plans."""
    columns = ("source", "framework", "model", "seq_len", "n_gpus", "gbs", "gpu", "precision")
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, row in enumerate(scored.rows):
        groups.setdefault(tuple(row[column] for column in columns), []).append(place)
    found = []
    for key, places in groups.items():
        seconds, predicted = scored.published_s[places], scored.predicted_s[places]
        if len(set(np.round(seconds, 4))) >= 4:
            taken = first_of(list(predicted), _simplicity([scored.rows[place] for place in places]))
            loss, fastest = (float(seconds[place] / seconds.min() - 1) for place in (taken, np.argmin(predicted)))
            found.append(Sweep(" ".join(key[:1] + key[2:5]), len(places), spearman(predicted, seconds), loss, fastest))
    return found


def _simplicity(rows: Sequence[Row]) -> list[Simplicity]:
    held = hold(rows)
    shares = np.broadcast_to(held.found.reserved, (len(rows),)) / held.memory_bytes
    cut = [(*degrees(row)[1:], number(row, "ep", 1.0)) for row in rows]
    again = np.broadcast_to(held.layout.recompute, (len(rows),))
    return [simplicity(one, int(code), float(share)) for one, code, share in zip(cut, again, shares, strict=True)]


def spearman(first: Array, second: Array) -> float:
    """The correlation of the ranks; ties share their mean rank."""

    def ranks(values: Array) -> Array:
        return np.array([np.mean(np.flatnonzero(np.sort(values) == value)) for value in values])

    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])

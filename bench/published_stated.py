"""What one stated property tells of a software whose name nobody knows: whether its layouts fit, and their peaks.

A name stands for a list of properties. Here the name stays unknown, and one property of it is told, as somebody would
who knows that much of a software of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from bench.published_memory import labels_of, peaks_of
from bench.published_rows import Change, IsNamed, Reading, Row, software_of
from superstep.cost.closed.framework import Software

LOSS = ("logit_bytes", "gathers_logits")
GRADIENTS = ("kept_gradient_bytes",)
UPDATE = ("update_bytes", "listed_bytes")
PROPERTIES: Mapping[str, Sequence[str]] = {
    "nothing": (),
    "copies of the logits, and whether they are gathered": LOSS,
    "bytes of a gradient as it is kept": GRADIENTS,
    "what the update makes": UPDATE,
    "logits and gradients": (*LOSS, *GRADIENTS),
    "all three": (*LOSS, *GRADIENTS, *UPDATE),
}
"""What is told, in words, and the fields of ``Software`` and ``Holding`` that it is."""


@dataclass(frozen=True, slots=True)
class Stated:
    """Layouts rightly said to fit or not, those wrongly refused, those let through; errors of peaks."""

    right: float
    false_alarms: int
    missed: int
    median: float
    p90: float


def stated(rows: Sequence[Row], is_named: IsNamed) -> dict[str, Stated]:
    """By what is told of each software that has no known name."""
    return {words: judged(rows, is_named, _telling(names, is_named)) for words, names in PROPERTIES.items()}


def judged(rows: Sequence[Row], is_named: IsNamed, change: Change) -> Stated:
    """Fits and peaks, every reading changed."""
    labels, peaks = labels_of(rows, is_named, change), peaks_of(rows, is_named, change)
    median, ninth = (float(np.quantile(peaks.errors, share)) for share in (0.5, 0.9))
    return Stated(labels.right[1], *labels.wrong, median, ninth)


def _telling(names: Sequence[str], is_named: IsNamed) -> Change:
    def change(row: Row, reading: Reading) -> Reading:
        if is_named(row):
            return reading
        return replace(reading, software=_with(reading.software, software_of(row), names))

    return change


def _with(software: Software, told: Software, names: Sequence[str]) -> Software:
    """A software with some properties of another."""
    own = {field.name for field in fields(Software)}
    of_memory = {name: getattr(told.holds, name) for name in names if name not in own}
    of_time = {name: getattr(told, name) for name in names if name in own}
    return replace(software, holds=replace(software.holds, **of_memory), **of_time)

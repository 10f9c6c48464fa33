"""The length of a tuned run: a number of steps, or of passes over its sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from superstep.data.sources.source import open_source, stream_of
from superstep.plan.resolution.resolve import Resolved
from superstep.train.weights.model import resolve_config


def length_of(epochs: float | None) -> Callable[[Resolved, Path], Resolved] | None:
    """A function that sets a run's steps to ``epochs`` passes over its prepared sequences; None without epochs."""

    def lengthen(run: Resolved, corpus: Path) -> Resolved:
        assert epochs is not None, "it counts passes"
        sequences = stream_of(run.config, open_source(corpus), "train").sequences
        # A rounding error of the product adds no step.
        steps = max(1, math.ceil(epochs * sequences / run.config.train.batch_sequences - 1e-9))
        return resolve_config(replace(run.config, train=replace(run.config.train, steps=steps)))

    return None if epochs is None else lengthen

"""rank_encoders: a run with its encoder in each place, the fastest first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from superstep.cost.program.time.predict import Prediction
from superstep.errors import ConfigError
from superstep.plan.config import EncoderPlacement
from superstep.plan.resolution.resolve import Resolved

PLACEMENTS: tuple[EncoderPlacement, ...] = get_args(EncoderPlacement)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEncoder:
    """A run with its encoder in one place, and its predicted step."""

    run: Resolved
    prediction: Prediction

    @property
    def unevenness(self) -> float:
        """The busy seconds of the slowest pipeline rank over the mean of all."""
        busy = [uses.busy_s for uses in self.prediction.timeline.measure_uses()]
        return max(busy) / statistics.mean(busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What samples have for an encoder: patches of pictures, or frames of sounds.

    Attributes:
        field: of the samples.
        quantiles: rows of the field in a sample: of a tenth of the samples at most the first number, of half of them
            the second, of nine tenths the third.
        filled: the share of a batch's capacity that is used.
    """

    field: str
    quantiles: tuple[int, int, int]
    filled: float


def read_pictures(field: str, sizes: Sequence[int], *, rows: int, capacity: int) -> Pictures:
    """The pictures of some samples.

    Args:
        field: its name.
        sizes: rows of the field in each sample.
        rows: rows of a batch that these samples fill.
        capacity: of a row.
    """
    ordered = sorted(sizes)
    tenth, half, most = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    return Pictures(field=field, quantiles=(tenth, half, most), filled=sum(sizes) / (rows * capacity))


def rank_encoders(
    resolve: Callable[[EncoderPlacement], Resolved],
    predict: Callable[[Resolved], Prediction],
    placements: Iterable[EncoderPlacement] = PLACEMENTS,
) -> tuple[tuple[PlacedEncoder, ...], tuple[str, ...]]:
    """The run in each place where it can be, and why it cannot be in the others.

    Args:
        resolve: the run with a placement.
        predict: its step.
        placements: those to try.
    """
    placed, refused = [], []
    for placement in placements:
        try:
            run = resolve(placement)
        except ConfigError as error:
            refused.append(str(error))
            continue
        placed.append(PlacedEncoder(run=run, prediction=predict(run)))
    return tuple(sorted(placed, key=lambda each: each.prediction.step_s)), tuple(refused)

"""Compares two runs: which settings differ, and whether a difference in loss is more than noise.

Losses are compared step by step: runs with the same data order see the same batches, and a batch's effect cancels.
Differences of neighbouring steps are correlated, so their mean's error is estimated from the means of long blocks
(Flegal and Jones 2010, "batch means").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLOCKS = 10
LEAST_STEPS = 4 * BLOCKS
STUDENT = 2.262
"""Student's t for nine degrees of freedom at 95%, two-sided."""
Difference = tuple[str, object, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One run compared with the first.

    Attributes:
        settings: dotted name, value in the first, value in the other, where they differ.
        steps: first and last compared step.
        difference: mean loss of the other minus the first over these steps; None with too few.
        error: half the width of its 95% interval.
    """

    names: tuple[str, str]
    settings: tuple[Difference, ...]
    steps: tuple[int, int] | None
    difference: float | None
    error: float | None

    @property
    def is_noise(self) -> bool | None:
        """Whether the interval contains zero; None if unknown."""
        if self.difference is None or self.error is None:
            return None
        return abs(self.difference) <= self.error

    def verdict(self) -> str:
        if self.steps is None or self.difference is None or self.error is None:
            return f"fewer than {LEAST_STEPS} steps of both: too few to compare their losses"
        what = f"{self.difference:+.4f} ± {self.error:.4f} over steps {self.steps[0]} to {self.steps[1]}"
        if self.difference == 0 and self.error == 0:
            return f"the same losses to the bit ({what})"
        return f"{what}: {'no more than noise' if self.is_noise else 'more than noise'}"

    def value(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "settings": [[name, str(one), str(other)] for name, one, other in self.settings],
            "steps": self.steps,
            "difference": self.difference,
            "error": self.error,
            "is_noise": self.is_noise,
            "verdict": self.verdict(),
        }


def compare(
    names: tuple[str, str],
    settings: tuple[Mapping[str, object], Mapping[str, object]],
    losses: tuple[Mapping[int, float], Mapping[int, float]],
) -> Comparison:
    """Compare two runs.

    Args:
        settings: of both, by dotted name.
        losses: of both, by step; steps without a finite loss are left out.
    """
    one, other = losses
    common = sorted(one.keys() & other.keys())
    # The second half: what differs at the start is forgotten by then, as far as it ever is.
    half = common[len(common) // 2 :]
    difference = mean_and_error([other[step] - one[step] for step in half]) if len(half) >= LEAST_STEPS else None
    return Comparison(
        names=names,
        settings=tuple(_different(*settings)),
        steps=(half[0], half[-1]) if difference else None,
        difference=difference[0] if difference else None,
        error=difference[1] if difference else None,
    )


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of correlated values, and half the width of its 95% interval."""
    wide = len(values) // BLOCKS
    # What does not fill a block is left out at the start.
    kept = values[len(values) - wide * BLOCKS :]
    means = [math.fsum(kept[k * wide : (k + 1) * wide]) / wide for k in range(BLOCKS)]
    mean = math.fsum(means) / BLOCKS
    variance = math.fsum((one - mean) ** 2 for one in means) / (BLOCKS - 1)
    return mean, STUDENT * math.sqrt(variance / BLOCKS)


def _different(one: Mapping[str, object], other: Mapping[str, object]) -> list[Difference]:
    names = [*one, *(name for name in other if name not in one)]
    return [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]

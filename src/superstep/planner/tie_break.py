"""Ties: plans that no formula tells apart, and which of them to take.

Errors of two plans of one model on one cluster are similar, so their order is known better than their seconds; but not
for plans nearer than ``TIE``. Of these the simpler one is taken: fewer axes, less recomputation, more free memory.
"""

from __future__ import annotations

from collections.abc import Sequence

TIE = 0.02
"""Of the faster step. Of published pairs predicted nearer than this, by constants without their stack, the one
predicted faster was faster in 45 to 59%; of pairs 2 to 3% apart in 80%.
"""

STEP = 0.05
"""Share of a chip's memory by which a plan must take less to be simpler than an otherwise equal one."""

Simplicity = tuple[int, int, int]
"""Cut mesh axes beside dp, recomputation (0 to 2), steps of memory: less is simpler."""


def tie_places(seconds: Sequence[float]) -> list[int]:
    """The places of all that are within a tie of the fastest."""
    least = min(seconds)
    return [place for place, each in enumerate(seconds) if each <= least * (1 + TIE)]


def first_of(seconds: Sequence[float], simplicity: Sequence[Simplicity]) -> int:
    """The place of the plan to take: the simplest of those tied with the fastest, of equals the faster."""
    return min(tie_places(seconds), key=lambda place: (simplicity[place], seconds[place]))


def simplicity(degrees: Sequence[float], recompute: int, memory_share: float) -> Simplicity:
    """The simplicity of a plan, from the degrees of its axes beside dp, and its share of the chip's memory."""
    return sum(degree > 1 for degree in degrees), recompute, round(memory_share / STEP)

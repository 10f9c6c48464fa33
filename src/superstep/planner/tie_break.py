"""Ties: plans that no formula tells apart, and which of them to take.

Errors of two plans of one model on one cluster are alike, so that their order is known better than their seconds; but
not for plans that are as near as ``TIE``. Of these the simpler one is taken: fewer axes, less that is computed again,
more memory to spare.
"""

from __future__ import annotations

from collections.abc import Sequence

TIE = 0.02
"""Of the faster step. Of published pairs that were predicted nearer to each other than this, by constants without their
stack, the one predicted faster was so in 45 to 59%; of pairs 2 to 3% apart in 80%."""

STEP = 0.05
"""Of a chip's memory: of plans that are alike otherwise, the one that takes so much less is simpler."""

Simplicity = tuple[int, int, int]
"""Axes of a mesh beside dp that are cut, what is computed again (0 to 2), steps of memory: less is simpler."""


def tie_places(seconds: Sequence[float]) -> list[int]:
    """The places of all that are within a tie of the fastest."""
    least = min(seconds)
    return [place for place, each in enumerate(seconds) if each <= least * (1 + TIE)]


def first_of(seconds: Sequence[float], simplicity: Sequence[Simplicity]) -> int:
    """The place of the plan to take: the simplest of those tied with the fastest, of equals the faster."""
    return min(tie_places(seconds), key=lambda place: (simplicity[place], seconds[place]))


def simplicity(degrees: Sequence[float], recompute: int, memory_share: float) -> Simplicity:
    """Of a plan, from the degrees of its axes beside dp, and the share of its chip's memory that it takes."""
    return sum(degree > 1 for degree in degrees), recompute, round(memory_share / STEP)

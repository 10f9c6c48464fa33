"""Interval: how far a step's seconds may be from what the formulas say.

Factors to either side that held 80% of published steps, each predicted by constants that were fitted without the stack
it is of, its sources, its clusters and its framework's name (``python -m bench.published``).
"""

from __future__ import annotations

SHARE = 0.8
WHOLE = 1.17
"""Where the whole plan is stated."""
OPEN = 1.24
"""Where the microbatch or what is computed again is not."""


def around(seconds: float, *, is_whole: bool = True) -> tuple[float, float]:
    """The seconds between which a step lies with a probability of ``SHARE``."""
    factor = WHOLE if is_whole else OPEN
    return seconds / factor, seconds * factor

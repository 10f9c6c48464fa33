"""Intervals: how wide 80% are, from the residuals of stacks that nothing was learned from.

A row's class says what is known of it: whether its plan is complete, whether its software is known. A large table
counts for more than a small one, but not by its rows: the interval is for the next stack. What is less known is never
given a narrower one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.published_rows import IsNamed, Row, number
from superstep.hardware.units import Array

SHARE = 0.8
WEIGHT = -0.1
"""A row weighs by its stack's rows to this power: 0 is by rows, -1 by stacks."""
FEWEST = 3
"""A class with rows of fewer stacks takes the width of all rows."""


def kind(row: Row, *, is_known: bool) -> str:
    """What is known of a row."""
    is_open = row["recompute"].startswith(("unknown", "recipe")) or not number(row, "mbs") or row["trust"] == "C"
    return _name(is_open=is_open, is_known=is_known)


def _name(*, is_open: bool, is_known: bool) -> str:
    return f"{'open' if is_open else 'whole'} plan, {'known' if is_known else 'unknown'} software"


def kinds(rows: Sequence[Row], is_known: IsNamed) -> list[str]:
    """Of each row."""
    return [kind(row, is_known=is_known(row)) for row in rows]


def width(deviations: Array, stacks: Sequence[str]) -> float:
    """The half-width in logarithms that holds so many of the deviations."""
    names, places = np.unique(np.asarray(stacks), return_inverse=True)
    counts = np.bincount(places, minlength=len(names))
    weights = counts[places] ** WEIGHT
    order = np.argsort(np.abs(deviations))
    share = np.cumsum(weights[order]) / weights.sum()
    return float(np.abs(deviations)[order][np.searchsorted(share, SHARE)])


def widths(deviations: Array, stacks: Sequence[str], classes: Sequence[str]) -> dict[str, float]:
    """Of each class, and of all rows under the empty name."""
    found = {"": width(deviations, stacks)}
    for each in dict.fromkeys(classes):
        own = np.array([name == each for name in classes])
        theirs = [stack for stack, mine in zip(stacks, own, strict=True) if mine]
        if len(set(theirs)) >= FEWEST:
            found[each] = width(deviations[own], theirs)
    for is_open, is_known in ((False, True), (False, False), (True, True), (True, False)):
        less = [_name(is_open=is_open, is_known=True), _name(is_open=False, is_known=is_known)]
        mine = _name(is_open=is_open, is_known=is_known)
        found[mine] = max([found.get(mine, found[""]), *(found[each] for each in less if each in found)])
    return found


def covered(deviations: Array, stacks: Sequence[str], classes: Sequence[str]) -> Array:
    """Whether each row lies in the interval that the other stacks' residuals give it."""
    names, inside = np.asarray(stacks), np.zeros(len(deviations), dtype=bool)
    for stack in dict.fromkeys(stacks):
        mine = names == stack
        others = [name for name in stacks if name != stack]
        theirs = [each for each, own in zip(classes, mine, strict=True) if not own]
        found = widths(deviations[~mine], others, theirs)
        for place in np.flatnonzero(mine):
            inside[place] = abs(deviations[place]) <= found[classes[place]]
    return inside

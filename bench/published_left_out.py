"""Leave one stack out: what is predicted of software, clusters and people that nothing was learned from.

A stack is a ``leak_group``: sources that share a software or a cluster leave together. All that names it leaves: its
rows do not bear on any constant, and a framework's name that no other stack's rows bear is software that nobody has
heard of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.published_fit import Slopes, refit
from bench.published_rows import Change, IsNamed, Row, known_of
from bench.published_steps import Steps
from superstep.cost.closed.efficiency import FITTED
from superstep.errors import ConfigError
from superstep.hardware.units import Array


@dataclass(frozen=True, slots=True)
class Unseen:
    """A stack as it is met by who has never seen it.

    Attributes:
        group: its name.
        values: the constants that were fitted without it.
        is_named: whether a row's framework is known from other stacks.
    """

    group: str
    values: dict[str, float]
    is_named: IsNamed


def named_without(rows: Sequence[Row], group: str) -> IsNamed:
    """Whether a row's framework stands for what other stacks' rows stand for too."""
    others = {known_of(row).words for row in rows if row["leak_group"] != group}
    return lambda row: known_of(row).words in others


def unseen(rows: Sequence[Row], near: Slopes) -> list[Unseen]:
    """Every stack in turn, with constants fitted on the others."""
    found = []
    for group in dict.fromkeys(row["leak_group"] for row in rows):
        without = refit(near, near.stacks != group)
        values = {name: each.value for name, each in without.items()}
        found.append(Unseen(group, values, named_without(rows, group)))
    return found


def seconds(rows: Sequence[Row], stacks: Sequence[Unseen], change: Change | None = None) -> Array:
    """Each row's step, predicted without its stack, every reading changed where a change is given.

    Raises:
        ConfigError: a row's chip is not known; ``Steps`` tells which beforehand.
    """
    predicted = np.zeros(len(rows))
    for stack in stacks:
        places = [place for place, row in enumerate(rows) if row["leak_group"] == stack.group]
        if not places:
            continue
        steps = Steps([rows[place] for place in places], stack.is_named, change)
        if steps.left_out:
            raise ConfigError(steps.left_out[0][1])
        predicted[places] = steps.seconds(FITTED.with_changes(stack.values))
    return predicted

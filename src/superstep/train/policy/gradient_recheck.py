"""Recheck of a step's gradient: ranks compute each other's rows and compare.

    place of dp     0    1    2        rows of the batch
    recomputed      x1   x2   x0       each computes those of the next
    the step        x0   x1   x2       its own

In exact mode the sums over places have the same bits, whichever rank computes which rows, so a difference is a
processor's error. It is detected before the update, which is then skipped. Then each place's rows are computed alone,
by three places if possible: the one that differs from the others is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from superstep.data.batch import Batch
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of
from superstep.numerics.loss import IGNORE
from superstep.numerics.objective import Objective
from superstep.plan.resolution.resolve import Plan
from superstep.train.policy.corruption_check import Corruption, Integrity

Compute = Callable[[int, int], str]
"""The fingerprint of one place's gradient, computed by a place: (place of the rows, computing place)."""

RowsOf = Callable[[int], Batch]
"""The rows of the global batch of a data-parallel place."""

MOST_VOTES = 3

RECOMPUTED, DIFFERS = "recomputed", "other ranks compute another gradient for the same rows"
"""Reasons of rejected steps."""


class GradientRecheck:
    """The recheck of one rank.

    Args:
        every: steps between two rechecks; None disables them.
        plan: of the run.
        engine: computes the gradient.
        integrity: computes its fingerprint.
    """

    def __init__(self, every: int | None, plan: Plan, engine: Engine, integrity: Integrity) -> None:
        self._every = every
        self._plan = plan
        self._engine = engine
        self._integrity = integrity

    def is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def gradient(self, rows_of: RowsOf, objective: Objective | None, *, shift: int, only: int | None = None) -> str:
        """The fingerprint of a global batch's gradient, where each place of dp computes another's rows; of place
        ``only`` alone, if given. The state does not change. Every rank calls this together.
        """
        mesh = self._engine.mesh
        place = (mesh.at.dp + shift) % mesh.shape.dp
        batch = rows_of(place)
        if only not in (None, place):
            batch = replace(batch, targets_BS=torch.full_like(batch.targets_BS, IGNORE))
        result = self._engine.train_step(
            microbatches_of(batch, self._plan, mesh, place),
            valid_tokens=batch.valid_tokens,
            divisor=batch.divisor,
            lr=0.0,
            objective=objective,
            judge=lambda *_: RECOMPUTED,
        )
        return self._integrity.gradient() if result.refused == RECOMPUTED else result.refused

    def blame(self, rows_of: RowsOf, objective: Objective | None, step: int) -> Corruption:
        """Ranks with a wrong gradient of a step; all ranks if that cannot be decided. Every rank calls this
        together.
        """
        shape = self._engine.mesh.shape

        def compute(rows: int, place: int) -> str:
            return self.gradient(rows_of, objective, shift=(rows - place) % shape.dp, only=rows)

        wrong = wrong_places(compute, shape.dp) or tuple(range(shape.dp))
        ranks = tuple(rank for rank in range(shape.world) if shape.at(rank).dp in wrong)
        return Corruption(step=step, what="the gradient", ranks=ranks, how="recomputed")


def wrong_places(compute: Compute, places: int) -> tuple[int, ...]:
    """Places that differ from the majority or from themselves; empty if that cannot be decided."""
    wrong: set[int] = set()
    for rows in range(places):
        who = [(rows - shift) % places for shift in range(min(MOST_VOTES, places))]
        # With two places, each computes twice: one that differs from itself is wrong.
        times = 1 if places >= MOST_VOTES else 2
        gradients = {place: [compute(rows, place) for _ in range(times)] for place in who}
        wrong |= {place for place, prints in gradients.items() if len(set(prints)) > 1}
        (most, votes), *_ = Counter(prints[0] for prints in gradients.values()).most_common()
        if 2 * votes > len(who):
            wrong |= {place for place, prints in gradients.items() if prints[0] != most}
    return tuple(sorted(wrong))

"""A step's gradient, computed by other ranks: what one rank alone computes, held against what another does.

    place of dp     0    1    2        rows of the batch
    recomputed      x1   x2   x0       each computes those of the next
    the step        x0   x1   x2       its own

In exact mode the sums over places have the same bits whoever computes which rows, so that a difference is an error of a
processor. It is seen before the update, which is then not made. After that each place's rows are computed alone, by
three places where there are so many: the one that others contradict is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from superstep.data.token_stream import Batch
from superstep.engine.engine import Engine
from superstep.engine.microbatch import microbatches_of
from superstep.numerics.loss import IGNORE
from superstep.numerics.objective import Objective
from superstep.plan.resolution.resolve import Plan
from superstep.train.policy.corruption_check import Corruption, Integrity

Compute = Callable[[int, int], str]
"""The fingerprint of the gradient of one place's rows, computed by another: (whose rows, who computes)."""

RowsOf = Callable[[int], Batch]
"""The rows of the global batch that a data-parallel place trains on, given the place."""

MOST_VOTES = 3

RECOMPUTED, DIFFERS = "recomputed", "its gradient is not what other ranks compute"
"""Why a step is not taken."""


class GradientRecheck:
    """One rank's.

    Args:
        every: steps between two that are computed twice; None computes none.
        plan: of the run.
        engine: computes.
        integrity: reads the gradient.
    """

    def __init__(self, every: int | None, plan: Plan, engine: Engine, integrity: Integrity) -> None:
        self._every = every
        self._plan = plan
        self._engine = engine
        self._integrity = integrity

    def is_due(self, step: int) -> bool:
        """Whether the gradient of a step is computed twice."""
        return self._every is not None and step % self._every == 0

    def gradient(self, rows_of: RowsOf, objective: Objective | None, *, shift: int, only: int | None = None) -> str:
        """The fingerprint of a global batch's gradient, where each place of dp computes the rows of another; of one
        place's rows only, if that is asked for. The state stays as it is. Every rank calls this together.
        """
        mesh = self._engine.mesh
        place = (mesh.at.dp + shift) % mesh.shape.dp
        batch = rows_of(place)
        if only not in (None, place):
            batch = replace(batch, targets_BS=torch.full_like(batch.targets_BS, IGNORE))
        result = self._engine.train_step(
            microbatches_of(batch, self._plan, mesh),
            valid_tokens=batch.valid_tokens,
            divisor=batch.divisor,
            lr=0.0,
            objective=objective,
            judge=lambda *_: RECOMPUTED,
        )
        return self._integrity.gradient() if result.refused == RECOMPUTED else result.refused

    def blame(self, rows_of: RowsOf, objective: Objective | None, step: int) -> Corruption:
        """Which ranks compute a step's gradient otherwise than others do; all, where that cannot be told. Every rank
        calls this together.
        """
        shape = self._engine.mesh.shape

        def compute(rows: int, place: int) -> str:
            return self.gradient(rows_of, objective, shift=(rows - place) % shape.dp, only=rows)

        wrong = wrong_places(compute, shape.dp) or tuple(range(shape.dp))
        ranks = tuple(rank for rank in range(shape.world) if shape.at(rank).dp in wrong)
        return Corruption(step=step, what="the gradient", ranks=ranks, how="recomputed")


def wrong_places(compute: Compute, places: int) -> tuple[int, ...]:
    """The places that compute otherwise than most, or than themselves; none where that cannot be told."""
    wrong: set[int] = set()
    for rows in range(places):
        who = [(rows - shift) % places for shift in range(min(MOST_VOTES, places))]
        # Of two, each computes twice: what does not agree with itself is wrong.
        times = 1 if places >= MOST_VOTES else 2
        gradients = {place: [compute(rows, place) for _ in range(times)] for place in who}
        wrong |= {place for place, prints in gradients.items() if len(set(prints)) > 1}
        (most, votes), *_ = Counter(prints[0] for prints in gradients.values()).most_common()
        if 2 * votes > len(who):
            wrong |= {place for place, prints in gradients.items() if prints[0] != most}
    return tuple(sorted(wrong))

"""Layout: how a step is split over the chips, of one plan or of many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from superstep.hardware.units import Array

SCHEDULES = ("1f1b", "gpipe", "interleaved", "breadth-first", "zb-h1", "zb-v", "zb-2p")
RECOMPUTE = ("none", "selective", "full")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Plans by their degrees; arrays of one shape are as many plans.

    Attributes:
        dp, tp, pp, cp, ep: ranks on each mesh axis; ep is folded over dp, cp and tp.
        shards: ranks of a ZeRO shard group; dp · cp / replicas.
        zero: stage 0 to 3.
        sequence_parallel: 1 where the work between tensor-parallel regions is split over the sequence.
        chunks: stages on each pipeline rank.
        schedule: index into ``SCHEDULES``.
        microbatch: sequences that pass the model at once on a data-parallel rank.
        microbatches: their number in a step.
        recompute: index into ``RECOMPUTE``.
        recomputed_layers: share of the layers that are recomputed; 1 for all of them.
        offload: 1 where the optimizer's state is in host memory.
        group: microbatches that pass a stage before the next stage's turn; 0 for none, or the schedule's usual.
        gathers, reductions: how often a rank gathers each parameter, and sums each gradient, in a step; 0 for the
            usual:
        with ZeRO 3 twice and once for each microbatch, else once. Where they are given, sums over replicas come last,
        as in our program.
        is_ulysses: 1 where cp exchanges heads for tokens; 0 where keys go round a ring.
    """

    dp: Array
    tp: Array
    pp: Array
    cp: Array
    ep: Array
    shards: Array
    zero: Array
    sequence_parallel: Array
    chunks: Array
    schedule: Array
    microbatch: Array
    microbatches: Array
    recompute: Array
    recomputed_layers: Array
    offload: Array
    group: Array = field(default_factory=lambda: np.zeros(()))
    gathers: Array = field(default_factory=lambda: np.zeros(()))
    reductions: Array = field(default_factory=lambda: np.zeros(()))
    is_ulysses: Array = field(default_factory=lambda: np.zeros(()))

    @property
    def shards_optimizer(self) -> NDArray[np.bool_]:
        return np.asarray(self.zero >= 1)

    @property
    def shards_gradients(self) -> NDArray[np.bool_]:
        return np.asarray(self.zero >= 2)

    @property
    def shards_parameters(self) -> NDArray[np.bool_]:
        return np.asarray(self.zero >= 3)

    @property
    def world(self) -> Array:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def is_full(self) -> Array:
        """1 where the whole block is recomputed."""
        return np.where(self.recompute == RECOMPUTE.index("full"), 1.0, 0.0)

    @property
    def is_selective(self) -> Array:
        """1 where only the work between products is recomputed."""
        return np.where(self.recompute == RECOMPUTE.index("selective"), 1.0, 0.0)


def once_for_each_run(layout: Layout, names: Sequence[str], formula: Callable[[Layout], T]) -> T:
    """A formula's results for many plans, computed once for neighbouring plans with equal inputs.

    A search lists all schedules and shardings of one core after the other, and most formulas depend only on the core.

    Args:
        names: the fields that the formula reads.
        formula: returns a dataclass of arrays; its other inputs are the same for all plans.
    """
    columns = {name: column for name in names if (column := getattr(layout, name)).ndim}
    is_first = np.zeros(max(map(len, columns.values()), default=0), dtype=bool)
    is_first[:1] = True
    for column in columns.values():
        is_first[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(is_first)
    if 2 * len(first) >= len(is_first):
        return formula(layout)
    results: Any = formula(replace(layout, **{name: column[first] for name, column in columns.items()}))
    of = np.cumsum(is_first) - 1
    each = {part.name: np.asarray(getattr(results, part.name)) for part in fields(results)}
    spread: T = replace(results, **{name: values[of] if values.ndim else values for name, values in each.items()})
    return spread

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
        shards: ranks that a ZeRO shard is spread over; dp · cp / replicas.
        zero: stage 0 to 3.
        sequence_parallel: 1 where what lies between tensor-parallel regions is split over the sequence.
        chunks: stages on each pipeline rank.
        schedule: index into ``SCHEDULES``.
        microbatch: sequences that go through the model at once on a data-parallel rank.
        microbatches: of them in a step.
        recompute: index into ``RECOMPUTE``.
        recomputed_layers: share of the layers that are recomputed; 1 for all of them.
        offload: 1 where the optimizer's state lives in the host's memory.
        group: microbatches that pass a stage before the next stage's turn; 0 where the schedule has none, or its usual.
        gathers, reductions: times in a step that a rank gathers each parameter, and sums each gradient; 0 for what is
            usual: with ZeRO 3 twice and once for each microbatch, else once. Where they are given, sums over replicas
            come last, as in our program.
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
        """Where ZeRO shards master weights and moments: stage 1 and above."""
        return np.asarray(self.zero >= 1)

    @property
    def shards_gradients(self) -> NDArray[np.bool_]:
        """Where it shards gradients too: stage 2 and above."""
        return np.asarray(self.zero >= 2)

    @property
    def shards_parameters(self) -> NDArray[np.bool_]:
        """Where it shards parameters too: stage 3."""
        return np.asarray(self.zero >= 3)

    @property
    def world(self) -> Array:
        """Chips."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def is_full(self) -> Array:
        """1 where the whole block is computed again."""
        return np.where(self.recompute == RECOMPUTE.index("full"), 1.0, 0.0)

    @property
    def is_selective(self) -> Array:
        """1 where only what lies between the products is."""
        return np.where(self.recompute == RECOMPUTE.index("selective"), 1.0, 0.0)


def once_for_each_run(layout: Layout, names: Sequence[str], formula: Callable[[Layout], T]) -> T:
    """What a formula gives of each plan, computed once for plans beside each other that are alike in what it reads.

    A search lists all schedules and shardings of one core after the other, and most formulas read the core alone.

    Args:
        layout: many plans.
        names: the fields that the formula reads.
        formula: gives a dataclass of arrays; whatever it reads beside the layout is one value for all plans.
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

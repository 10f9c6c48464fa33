"""Search: the best plans of a problem, exactly, without pricing all of them.

Cores come in the order of their bounds, so the search ends at the first core with a bound above the best plans. Plans
of one mesh are similar, so a search keeps the best plan of each of the best meshes. Plans of the same seconds are in
the order of their bytes, then of the space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from superstep.cost.closed.estimate import Estimate
from superstep.hardware.units import Array
from superstep.planner.plan_columns import Plans
from superstep.planner.price import Pricing
from superstep.planner.search_problem import SearchProblem
from superstep.planner.space import Space

CHUNK = 8192
"""Plans priced at once: their columns stay in a core's cache."""

AFTER_BOUNDS = 16
"""Chunks of plans checked together once there are bounds, which leave a few of them."""

SLACK = 1 + 1e-9
"""Rounding: a bound must be exceeded by more than this."""

Key = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedProblem:
    """A problem in one format of its products."""

    problem: SearchProblem
    pricing: Pricing

    @property
    def space(self) -> Space:
        return Space(self.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan with its price by the closed form. ``plan``: one row. ``parts``: of its step."""

    side: PricedProblem
    plan: Plans
    parts: Estimate
    memory_bytes: float

    @property
    def step_s(self) -> float:
        return float(self.parts.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        best: the best plan of each of the best meshes, the best first.
        plans: in the space.
        priced: those with computed seconds.
        too_large: those known not to fit; unpriced ones may not fit either.
    """

    best: tuple[PricedPlan, ...]
    plans: int
    priced: int
    too_large: int


def search(sides: Sequence[PricedProblem], *, keep: int, is_pruned: bool = True) -> SearchResult:
    """The best ``keep`` meshes' best plans, of all formats.

    Args:
        sides: the likely best first.
        is_pruned: False prices every plan that fits; the answer is the same.
    """
    kept = _Kept(keep)
    tally = _Tally()
    for side in sides:
        space = side.space
        cores = space.cores()
        counts = space.count(cores)
        tally.plans += int(counts.sum())
        for batch in _batches(side, cores, counts, kept, tally, is_pruned=is_pruned):
            _price(side, batch, kept, tally, is_pruned=is_pruned)
    return SearchResult(
        best=kept.best,
        plans=tally.plans,
        priced=tally.priced,
        too_large=tally.too_large,
    )


@dataclass(slots=True)
class _Tally:
    plans: int = 0
    priced: int = 0
    too_large: int = 0
    serial: int = 0


class _Kept:
    """The best plan of each mesh, for the ``most`` best meshes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.of_mesh: dict[float, tuple[Key, PricedPlan]] = {}

    @property
    def best(self) -> tuple[PricedPlan, ...]:
        """The best first."""
        return tuple(priced for _, priced in sorted(self.of_mesh.values(), key=lambda pair: pair[0]))

    @property
    def limit_s(self) -> float:
        """Seconds above which a plan is of no use."""
        if len(self.of_mesh) < self.most:
            return float("inf")
        return max(key[0] for key, _ in self.of_mesh.values())

    def offer(self, side: PricedProblem, key: Key, mesh: float, priced: PricedPlan) -> None:
        """Keep a plan if it is among the best."""
        if mesh not in self.of_mesh or key < self.of_mesh[mesh][0]:
            self.of_mesh[mesh] = (key, priced)
        if len(self.of_mesh) > self.most:
            del self.of_mesh[max(self.of_mesh, key=lambda other: self.of_mesh[other][0])]


def _batches(
    side: PricedProblem, cores: Plans, counts: Array, kept: _Kept, tally: _Tally, *, is_pruned: bool
) -> Iterator[Plans]:
    """Cores in batches of plans that are priced together, until none can be among the best."""
    if not len(cores):
        return
    bound_s = np.concatenate([side.pricing.core_bound_s(part) for part in chunks_of(cores)])
    least = np.concatenate([side.pricing.core_bound_bytes(part) for part in chunks_of(cores)])
    order = np.argsort(bound_s, kind="stable")
    if is_pruned:
        fits = least[order] <= side.pricing.memory_bytes * SLACK
        tally.too_large += int(counts[order[~fits]].sum())
        order = order[fits]
    at = 0
    while at < len(order):
        if is_pruned and bound_s[order[at]] > kept.limit_s * SLACK:
            return
        # Of the first a few, to know soon what the others have to be better than; then so many that are left of them.
        most = AFTER_BOUNDS * CHUNK if is_pruned and kept.limit_s < float("inf") else CHUNK
        total = np.cumsum(counts[order[at : at + most]])
        end = at + max(int(np.searchsorted(total, most, side="right")), 1)
        yield cores.take(order[at:end])
        at = end


def _price(side: PricedProblem, cores: Plans, kept: _Kept, tally: _Tally, *, is_pruned: bool) -> None:
    for part in chunks_of(side.space.with_schedules(cores)):
        if is_pruned and kept.limit_s < float("inf"):
            part = part.take(side.pricing.schedule_bound_s(part) <= kept.limit_s * SLACK)
        if is_pruned:
            fits = side.pricing.schedule_bound_bytes(part) <= side.pricing.memory_bytes * SLACK
            tally.too_large += int(side.space.count_shardings(part.take(~fits)).sum())
            part = part.take(fits)
        for plans in chunks_of(side.space.with_shardings(part)):
            held = side.pricing.bytes(plans)
            fits = held <= side.pricing.memory_bytes
            tally.too_large += len(plans) - int(fits.sum())
            if fits.any():
                _offer(side, plans.take(fits), held[fits], kept, tally)


def _offer(side: PricedProblem, plans: Plans, held: Array, kept: _Kept, tally: _Tally) -> None:
    parts = side.pricing.seconds(plans)
    step_s = np.broadcast_to(parts.step_s, (len(plans),))
    tally.priced += len(plans)
    useful = np.flatnonzero(step_s <= kept.limit_s * SLACK)
    order = useful[np.lexsort((useful, held[useful], step_s[useful]))]
    # The first of each mesh.
    _, first = np.unique(plans.mesh[order], return_index=True)
    for row in order[np.sort(first)]:
        key = (float(step_s[row]), float(held[row]), float(tally.serial))
        tally.serial += 1
        priced = PricedPlan(
            side=side,
            plan=plans.take(np.array([row])),
            parts=parts_of(parts, int(row), len(plans)),
            memory_bytes=float(held[row]),
        )
        kept.offer(side, key, float(plans.mesh[row]), priced)


def parts_of(parts: Estimate, row: int, rows: int) -> Estimate:
    """One plan's row of an estimate of many."""
    return Estimate(
        **{field.name: np.broadcast_to(getattr(parts, field.name), (rows,))[row] for field in fields(parts)}
    )


def chunks_of(plans: Plans) -> Iterator[Plans]:
    """Plans in pieces that fit the cache."""
    for start in range(0, len(plans), CHUNK):
        yield plans.take(np.arange(start, min(start + CHUNK, len(plans))))

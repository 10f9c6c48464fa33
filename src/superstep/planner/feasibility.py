"""Demand: whether a problem has plans at all, and what would have to change otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from superstep.cost.closed.memory import Footprint
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.planner.price import pricing_of
from superstep.planner.search import PricedProblem, search
from superstep.planner.search_problem import SearchProblem
from superstep.planner.space import Space, meshes

DEGREES = ("pp", "dp", "cp", "tp", "ep")

LEAST_CORES = 16
"""Cores of which the plans are searched for the smallest: the order of bounds is not quite that of plans."""
MOST_CHIPS = 2**20
"""The end of the search for a large enough cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """Approximately the least memory of a plan on one chip."""

    bytes: float
    held: Footprint

    @property
    def category(self) -> str:
        """Its largest part."""
        return max((field.name for field in fields(Footprint)), key=lambda name: float(getattr(self.held, name)[0]))


def check_problem(problem: SearchProblem) -> None:
    """Check that some layout of all chips divides the batch, and keeps the rules; raises ConfigError with the nearest
    batch that divides, or the rules.
    """
    if len(Space(problem).cores()):
        return
    free = replace(problem, rules=())
    if next(meshes(free), None) is not None:
        rules = ", ".join(f"plan.{rule.field} = {rule.value!r}" for rule in problem.rules if rule.is_wanted)
        raise ConfigError(
            f"--fix {rules}: no layout of {problem.cluster.chips} chips has it with {problem.batch_sequences} "
            f"sequences a step; {_mend(problem)}."
        )
    raise ConfigError(
        f"--global-batch = {problem.batch_sequences} sequences: no layout of {problem.cluster.chips} chips divides "
        f"them; the nearest number that one does is {nearest_batch(free)}."
    )


def _mend(problem: SearchProblem) -> str:
    """A working value for the first rule on a degree."""
    for rule in problem.rules:
        others = replace(problem, rules=tuple(other for other in problem.rules if other is not rule))
        if rule.field in DEGREES and (possible := sorted({getattr(mesh, rule.field) for mesh in meshes(others)})):
            return f"set plan.{rule.field} to one of {possible}"
    return "leave some of it open"


def nearest_batch(problem: SearchProblem) -> int:
    """The number of sequences nearest to the problem's that some layout divides; of two the larger.

    A layout divides the multiples of its dp, so the possible dp of any batch decide.
    """
    chips = problem.cluster.chips
    anything = replace(problem, base=_with_batch(problem, chips))
    possible = {mesh.dp for mesh in meshes(anything)}
    wanted = problem.batch_sequences
    near = {max(round_(wanted / dp), 1) * dp for dp in possible for round_ in (np.floor, np.ceil)}
    return int(min(near, key=lambda batch: (abs(batch - wanted), -batch)))


def _with_batch(problem: SearchProblem, sequences: int) -> RunConfig:
    return replace(problem.base, train=replace(problem.base.train, batch_sequences=sequences))


def smallest(side: PricedProblem) -> LeastMemory:
    """Approximately the least memory of a plan: of the cores with the least bounds, on all schedules and shardings."""
    cores = side.space.cores()
    bounds = np.broadcast_to(side.pricing.core_bound_bytes(cores), (len(cores),))
    least = cores.take(np.argsort(bounds, kind="stable")[:LEAST_CORES])
    plans = side.space.with_shardings(side.space.with_schedules(least))
    best = plans.take(np.array([int(np.argmin(side.pricing.bytes(plans)))]))
    held = side.pricing.predict_memory(best)
    return LeastMemory(bytes=float(np.broadcast_to(held.reserved, (1,))[0]), held=held)


def smallest_cluster(sides: Sequence[PricedProblem]) -> int | None:
    """The fewest chips of the kind on which a plan fits; None where ``MOST_CHIPS`` do not suffice.

    Within a domain the number doubles; beyond it, whole domains double until a plan fits, then it is bisected.
    """
    problem = sides[0].problem
    chips, domain = problem.cluster.chips, problem.cluster.domain

    def fits(count: int) -> bool:
        enlarged = [_enlarge(side.problem, count) for side in sides]
        return any(search([each], keep=1).best for each in enlarged if len(each.space.cores()))

    while 2 * chips <= domain:
        chips *= 2
        if fits(chips):
            return chips
    domains = _least(lambda count: fits(count * domain), max(chips // domain, 1), MOST_CHIPS // domain)
    return None if domains is None else domains * domain


def _enlarge(problem: SearchProblem, chips: int) -> PricedProblem:
    larger = problem.on(chips)
    return PricedProblem(problem=larger, pricing=pricing_of(larger))


def _least(fits: Callable[[int], bool], low: int, most: int) -> int | None:
    """The least number above ``low`` that fits, where all above it do."""
    high = 2 * low
    while not fits(high):
        low, high = high, 2 * high
        if high > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high

"""Candidates: which of the plans that a search found have their programs priced first.

The closed form ranks plans of one kind well, and schedules less so: the program tells. A program's price takes time in
proportion to its instructions, so those of the first answer have ``BUDGET`` of them together.
"""

from __future__ import annotations

from collections.abc import Sequence

from superstep.plan.resolve import resolve
from superstep.planner.plan_columns import run_config
from superstep.planner.search import PricedPlan
from superstep.planner.simulate_best import MOST_INSTRUCTIONS, instructions_of

BUDGET = 130_000
"""Instructions: about two seconds of a processor."""


def candidates(best: Sequence[PricedPlan]) -> list[PricedPlan]:
    """The best of each kind, by the axes that are cut and the schedule, as far as the budget goes; at least one."""
    chosen: list[PricedPlan] = []
    kinds: set[tuple[object, ...]] = set()
    left = BUDGET
    for priced in best:
        kind = kind_of(priced)
        if kind in kinds:
            continue
        problem = priced.side.problem
        run = resolve(run_config(priced.plan.plan_config(0, problem), problem), is_priced=True)
        # A program that is too long keeps its closed form, at no cost; so does one of a model that is not trained here.
        cost = 0 if run.shape.is_priced_only or instructions_of(run) > MOST_INSTRUCTIONS else instructions_of(run)
        if cost <= left or not chosen:
            kinds.add(kind)
            chosen.append(priced)
            left -= cost
    return chosen


def kind_of(priced: PricedPlan) -> tuple[object, ...]:
    """The axes that are cut, and the schedule."""
    plan = priced.plan
    degrees = tuple(bool(getattr(plan, name)[0] > 1) for name in ("pp", "dp", "cp", "tp", "ep"))
    return (*degrees, int(plan.schedule[0]))

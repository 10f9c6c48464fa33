"""Candidates: which plans of a search have their programs priced first, and which of them fit.

The closed form ranks plans of one kind well, and schedules less so: the program decides. Pricing a program takes time
in proportion to its instructions, so the first answer's programs have ``BUDGET`` of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from superstep.plan.resolution.resolve import resolve
from superstep.planner.plan_columns import run_config
from superstep.planner.search import PricedPlan, PricedProblem, SearchResult, search
from superstep.planner.simulate_best import MOST_INSTRUCTIONS, SimulatedPlan, instructions_of, verify

BUDGET = 130_000
"""Instructions: about two seconds of a processor."""


LESS = (1.02, 1.1)
"""Factors by which a search gets less memory where none of its plans fits: at least, and at most at once, so that it
does not skip plans with few communicators.
"""


def search_fitting(
    sides: Sequence[PricedProblem], *, keep: int
) -> tuple[SearchResult, tuple[SimulatedPlan, ...]] | None:
    """A search's result, and the best plan of each kind by the closed form with the price of its program, the fastest
    first; only those with programs that fit. None without any.
    """
    limited = list(sides)
    while True:
        answer = search(limited, keep=keep)
        if not answer.best:
            return None
        plans = [verify(each) for each in candidates(answer.best)]
        if fit := fitting(plans) or fitting([verify(each) for each in answer.best]):
            return answer, tuple(sorted(fit, key=lambda plan: plan.step_s))
        # The closed form has promised too much, or knows no communicators: by how much tells what to ask of it.
        most = sides[0].problem.memory_bytes
        excess = min(plan.memory_bytes / most for plan in plans)
        least = limited[0].pricing.memory_bytes / min(max(excess, LESS[0]), LESS[1])
        limited = [replace(side, pricing=replace(side.pricing, memory_bytes=least)) for side in limited]


def fitting(plans: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """Those with programs that fit."""
    return [plan for plan in plans if plan.memory_bytes <= plan.priced.side.problem.memory_bytes]


def candidates(best: Sequence[PricedPlan]) -> list[PricedPlan]:
    """The best of each kind, by cut axes and schedule, within the budget; at least one."""
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
    plan = priced.plan
    degrees = tuple(bool(getattr(plan, name)[0] > 1) for name in ("pp", "dp", "cp", "tp", "ep"))
    return (*degrees, int(plan.schedule[0]))

"""Neighbours: for each axis, the best plan that differs in it; and plans after the loss of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from superstep.cost.closed.parallel_degrees import RECOMPUTE
from superstep.plan.config import Dtype, PlanConfig
from superstep.planner.price import pricing_of
from superstep.planner.search import PricedPlan, PricedProblem, search
from superstep.planner.search_problem import Rule, SearchProblem
from superstep.planner.shortlist import search_fitting
from superstep.planner.simulate_best import SimulatedPlan, verify
from superstep.planner.tie_break import Simplicity, first_of, simplicity

AXES = ("tp", "pp", "cp", "ep", "zero", "replicas", "schedule", "microbatch", "recompute", "sequence_parallel")
"""The fields in which a neighbour differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """The best plan with another value of a field.

    Attributes:
        field, value: of ``[plan]``.
        slower: its step over the best plan's, minus 1.
        spared_bytes: less memory than the best plan; negative where it takes more.
    """

    field: str
    value: object
    plan: SimulatedPlan
    slower: float
    spared_bytes: float


@dataclass(slots=True)
class Memo:
    """Searches and programs that were already priced; neighbours of neighbours share most of them."""

    searches: dict[Rule, tuple[PricedPlan, ...]] = field(default_factory=dict)
    programs: dict[PlanConfig, SimulatedPlan] = field(default_factory=dict)

    def price(self, side: PricedProblem, rule: Rule) -> list[SimulatedPlan]:
        """The best plans under one more rule, with the price of their programs."""
        if rule not in self.searches:
            problem = side.problem
            ruled = replace(side, problem=replace(problem, rules=(*problem.rules, rule)))
            self.searches[rule] = search([ruled], keep=1).best if len(ruled.space.cores()) else ()
        return [self.verify(replace(priced, side=side)) for priced in self.searches[rule]]

    def verify(self, priced: PricedPlan) -> SimulatedPlan:
        """The price of a plan's program."""
        plan = priced.plan.plan_config(0, priced.side.problem)
        if plan not in self.programs:
            self.programs[plan] = verify(priced)
        return self.programs[plan]


def neighbours(
    best: SimulatedPlan,
    known: Sequence[SimulatedPlan] = (),
    memo: Memo | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[Neighbour]:
    """The cost of each field: the best plan that differs in it by the closed form, with the price of its program.

    Args:
        best: the plan to compare with.
        known: plans with priced programs; one of them may be faster than the closed form's best.
        memo: earlier prices, for one format of the products.
        tell: called with each field before its search.
    """
    memo = Memo() if memo is None else memo
    side = best.priced.side
    problem, plan = side.problem, best.run.config.plan
    tried = {best.run.plan}
    for name in AXES:
        if name == "sequence_parallel" and plan.tp == 1:
            continue
        tell(name)
        rule = Rule(name, getattr(plan, name), is_wanted=False)
        priced = memo.price(side, rule)
        if not memo.searches[rule]:
            continue
        priced += [each for each in known if getattr(each.run.config.plan, name) != rule.value]
        fitting = [e for e in priced if e.memory_bytes <= problem.memory_bytes and e.run.plan not in tried]
        if fitting:
            first = min(fitting, key=lambda each: each.step_s)
            tried.add(first.run.plan)
            yield Neighbour(
                field=name,
                value=getattr(first.run.config.plan, name),
                plan=first,
                slower=first.step_s / best.step_s - 1,
                spared_bytes=best.memory_bytes - first.memory_bytes,
            )


def improve(
    best: SimulatedPlan,
    known: Sequence[SimulatedPlan] = (),
    *,
    rounds: int = 4,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[SimulatedPlan, tuple[Neighbour, ...]]:
    """The best plan, or one reached by a few steps from neighbour to better neighbour; and its neighbours.

    The search ranks by the closed form, and another plan's program may be faster. Of all plans tied with the fastest
    the simplest is taken. ``tell``: called with each field before its search.
    """
    memos: dict[Dtype, Memo] = {}
    near = [best, *known]
    for each in near:
        memo = memos.setdefault(each.priced.side.problem.compute, Memo())
        memo.programs[each.run.config.plan] = each
    while True:
        nearby = tuple(neighbours(best, near, memos[best.priced.side.problem.compute], tell))
        near += [each.plan for each in nearby]
        chosen = simplest(near)
        if chosen.run.plan == best.run.plan or not rounds:
            return best, nearby
        best, rounds = chosen, rounds - 1


def simplest(plans: Sequence[SimulatedPlan]) -> SimulatedPlan:
    """The simplest of those that are tied with the fastest."""
    return plans[first_of([each.step_s for each in plans], [simplicity_of(each) for each in plans])]


def of_kinds(plans: Sequence[SimulatedPlan]) -> tuple[SimulatedPlan, ...]:
    """The first of each kind: plans that cut the same axes are one kind, for any degrees."""
    best: dict[tuple[bool, ...], SimulatedPlan] = {}
    for plan in plans:
        mesh = plan.run.plan.mesh
        best.setdefault(tuple(degree > 1 for degree in (mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.ep)), plan)
    return tuple(best.values())


def simplicity_of(plan: SimulatedPlan) -> Simplicity:
    """The simplicity of a plan, to compare equally fast ones."""
    mesh, full = plan.run.plan.mesh, plan.run.plan
    share = plan.memory_bytes / plan.priced.side.problem.memory_bytes
    return simplicity((mesh.tp, mesh.pp, mesh.cp, mesh.ep), RECOMPUTE.index(full.recompute), share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A plan for the rest of a cluster.

    Attributes:
        lost: nodes.
        chips: that the plan uses; the largest possible number of those left.
        verified: the plan, resolved and compiled; None where none fits.
    """

    lost: int
    chips: int
    verified: SimulatedPlan | None


def fallbacks(problems: Sequence[SearchProblem], nodes: int) -> Iterator[Fallback]:
    """The best plan after the loss of 1, 2, ... ``nodes`` nodes, with the same global batch."""
    cluster = problems[0].cluster
    node = min(cluster.domain, cluster.chips)
    for lost in range(1, nodes + 1):
        left = cluster.chips - lost * node
        yield next(_on(problems, lost, left, node), Fallback(lost=lost, chips=0, verified=None))


def _on(problems: Sequence[SearchProblem], lost: int, left: int, node: int) -> Iterator[Fallback]:
    for chips in range(left, 0, -node):
        sides = [PricedProblem(problem=each, pricing=pricing_of(each)) for each in (p.on(chips) for p in problems)]
        fallback = search_fitting([side for side in sides if len(side.space.cores())], keep=1)
        if fallback is not None:
            yield Fallback(lost=lost, chips=chips, verified=fallback[1][0])

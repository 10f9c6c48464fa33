"""Elastic: the plans for fewer chips of a run, chosen before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from superstep.errors import ConfigError
from superstep.hardware.cluster import Cluster
from superstep.plan.config import ZERO_BUBBLE, PlanConfig, RunConfig
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.planner.price import pricing_of
from superstep.planner.search import PricedProblem, search
from superstep.planner.search_problem import Rule, SearchProblem
from superstep.planner.simulate_best import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerPlan:
    """A run under a plan for fewer chips. ``step_s``: by the price of its program; only for comparing plans."""

    run: Resolved
    step_s: float


KEPT = 32
"""The number of meshes tried; the first that the run can have is taken."""


def smaller_plan(
    run: Resolved,
    cluster: Cluster,
    memory_bytes: float,
    beside: Callable[[Resolved], int] = lambda _: 0,
    *,
    is_host: bool = False,
) -> SmallerPlan | None:
    """The best plan of a run on other chips: the same computation, and in exact mode the same bits.

    Args:
        run: as requested.
        cluster: the remaining chips.
        memory_bytes: of one, as far as a plan may fill it.
        beside: a plan's further bytes for each rank there, such as snapshots.
        is_host: the chips are cores of hosts.

    Returns:
        The run under the plan; None where none fits, or cuts the batch and the model.

    Raises:
        ConfigError: steps of this model are not predicted.
    """
    config = run.config
    if config.model.source is not None:
        raise ConfigError(
            f"train.elastic = true with model.source = '{config.model.source}': its steps are not predicted, so that "
            "no plan can be chosen for what is left; set train.elastic = false."
        )
    problem = SearchProblem(
        base=_without_unpriced(config),
        cluster=cluster,
        compute=config.numerics.compute,
        memory_bytes=memory_bytes,
        is_host=is_host,
        rules=tuple(_list_kept_rules(config)),
    )
    side = PricedProblem(problem=problem, pricing=pricing_of(problem))
    if not len(side.space.cores()):
        return None
    for option in search([side], keep=KEPT).best:
        plan = option.plan.plan_config(0, problem)
        try:
            again = resolve(replace(config, plan=replace(plan, rules=config.plan.rules, device=config.plan.device)))
        except ConfigError:  # exact mode cuts less finely, say
            continue
        priced = verify(option)
        if priced.memory_bytes + beside(again) <= memory_bytes:
            return SmallerPlan(run=again, step_s=priced.step_s)
    return None


def _without_unpriced(config: RunConfig) -> RunConfig:
    """The run without settings that have no price."""
    numerics = replace(config.numerics, exact=False)
    state = replace(config.state, recompute_every=None)
    plan = PlanConfig(prefetch=config.plan.prefetch)
    return replace(config, numerics=numerics, state=state, lora=None, freeze=None, plan=plan)


def _list_kept_rules(config: RunConfig) -> Iterator[Rule]:
    """The rules for what may not change."""
    if config.numerics.exact:  # gradients of microbatches are summed in their order
        yield Rule("microbatch", config.plan.microbatch)
    if config.numerics.compile:
        yield from (Rule("schedule", name, is_wanted=False) for name in ZERO_BUBBLE)

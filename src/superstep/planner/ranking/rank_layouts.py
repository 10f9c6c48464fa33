"""The best layouts of a model on a cluster: a first table at once, and its refinement.

first_plans     the search by the closed form, and the price of the programs of the best plans of each kind
refine          programs of all that the search found, and of the neighbours of the best
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.planner.calibration.calibrate_observation import Guide, guide
from superstep.planner.calibration.published_row import step_slopes
from superstep.planner.failure_cost import FailureCost, survival
from superstep.planner.feasibility import check_problem, smallest, smallest_cluster
from superstep.planner.plan_summary import Figures, figures
from superstep.planner.price import pricing_of
from superstep.planner.ranking.plan_request import PlanRequest, check_request, problems
from superstep.planner.search import PricedProblem, SearchResult
from superstep.planner.search_problem import SearchProblem
from superstep.planner.sensitivity import Fallback, Neighbour, fallbacks, improve, of_kinds, simplest
from superstep.planner.shortlist import fitting, search_fitting
from superstep.planner.simulate_best import SimulatedPlan, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPlans:
    """What a search found.

    Attributes:
        request: what was planned for.
        known: of the shares of peaks that are reached.
        sides: the problem in each format that the chip multiplies in.
        answer: of the search by the closed form.
        priced: of each kind of plans the best by the closed form with the price of its program, of those that fit; the
            fastest first.
    """

    request: PlanRequest
    known: Guide
    sides: tuple[PricedProblem, ...]
    answer: SearchResult
    priced: tuple[SimulatedPlan, ...]

    @property
    def plans(self) -> tuple[SimulatedPlan, ...]:
        """The plans to show."""
        return of_kinds((simplest(self.priced), *self.priced))[: self.request.top]

    def figures_of(self, plans: Sequence[SimulatedPlan]) -> tuple[Figures, ...]:
        """Step, memory, days and price of plans."""
        request = self.request
        return tuple(figures(plan, request.tokens, request.price, narrowed=self.narrowing(plan)) for plan in plans)

    def narrowing(self, plan: SimulatedPlan) -> float:
        """What calibration leaves of the width of a plan's interval."""
        if self.known.covariance is self.known.before:
            return 1.0
        cluster = plan.priced.side.problem.cluster
        return self.known.remaining_width(step_slopes(plan.run, cluster, self.known.efficiency))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRanking:
    """The best plans.

    Attributes:
        answer: of the search by the closed form.
        plans: the best of each kind of plans, the best of all first.
        figures: of each, in the same order: step, memory, days and price.
        neighbours: for each field, the best plan that differs in it.
        fallbacks: plans for fewer nodes.
        survival: what failures cost the best plan; None where nothing is known of the chip's.
        best: the run that trains the best plan, for as many steps as the request's tokens take.
    """

    answer: SearchResult
    plans: tuple[SimulatedPlan, ...]
    figures: tuple[Figures, ...]
    neighbours: tuple[Neighbour, ...]
    fallbacks: tuple[Fallback, ...]
    survival: FailureCost | None
    best: RunConfig


def plan(model: str, request: PlanRequest) -> PlanRanking:
    """Rank every layout of a model on a cluster, as ``superstep plan`` does.

    Args:
        model: a named size, a Hugging Face config.json or a run.toml.
        request: what to plan for.

    Raises:
        ConfigError: the model, the cluster or a number cannot be used, or no plan fits.
    """
    check_request(request)
    return refine(first_plans(problems(model, request), request))


def first_plans(formats: Sequence[SearchProblem], request: PlanRequest, known: Guide | None = None) -> FirstPlans:
    """The first answer.

    Args:
        formats: the problem in each format that the chip multiplies in.
        request: that they are of.
        known: of the shares of peaks that are reached; None takes those that are published.

    Raises:
        ConfigError: no layout divides the problem, or none fits; it says what would.
    """
    known = guide() if known is None else known
    formats = [replace(problem, efficiency=known.efficiency) for problem in formats]
    check_problem(formats[0])
    sides = tuple(PricedProblem(problem=problem, pricing=pricing_of(problem)) for problem in formats)
    # More than are shown: their programs may rank otherwise than the closed form.
    ranking = search_fitting(sides, keep=3 * request.top)
    if ranking is None:
        raise _too_large(sides, request)
    answer, priced = ranking
    return FirstPlans(request=request, known=known, sides=sides, answer=answer, priced=priced)


def refine(first: FirstPlans, tell: Callable[[str], None] = lambda _: None) -> PlanRanking:
    """The programs of all that the search found, and of neighbours.

    Args:
        first: what it found.
        tell: is called with each field whose neighbours are searched.
    """
    answer, plans, request = first.answer, first.priced, first.request
    done = {each.run.config.plan for each in plans}
    # The closed form is seldom above a program's price: what it puts behind the best program is.
    least = min(each.step_s for each in plans)
    near = (each for each in answer.best if each.step_s <= least)
    left = [each for each in near if each.plan.plan_config(0, each.side.problem) not in done]
    more = [verify(each) for each in left]
    priced = sorted((*plans, *fitting(more)), key=lambda plan: plan.step_s)
    best, beside = improve(priced[0], priced, tell=tell)
    shown = of_kinds((best, *priced))[: request.top]
    return PlanRanking(
        answer=answer,
        plans=shown,
        figures=first.figures_of(shown),
        neighbours=beside,
        fallbacks=tuple(fallbacks([side.problem for side in first.sides], request.fallback)),
        survival=survival(shown[0], None if request.mtbf is None else 1 / request.mtbf),
        best=_run_of(shown[0], request.tokens),
    )


def _run_of(plan: SimulatedPlan, tokens: float | None) -> RunConfig:
    """The run that trains a plan, for as many steps as the tokens take."""
    config = plan.run.config
    if tokens is None:
        return config
    steps = -(-int(tokens) // plan.priced.side.problem.batch_tokens)
    return replace(config, train=replace(config.train, steps=steps))


def _too_large(sides: Sequence[PricedProblem], request: PlanRequest) -> ConfigError:
    least, problem = smallest(sides[0]), sides[0].problem
    chips = smallest_cluster(sides)
    mend = f"{chips} of these chips are enough" if chips else "more of these chips do not help"
    whose = "" if request.memory is not None else f" (what is a plan's of the memory of {problem.cluster.chip.name})"
    return ConfigError(
        f"--memory = {problem.memory_bytes / 2**30:.4g} GiB a chip{whose}: no plan fits on {problem.cluster.chips} "
        f"chips; the smallest takes about {least.bytes / 2**30:.3g} GiB and its communicators, most of it "
        f"{least.category}; {mend}."
    )

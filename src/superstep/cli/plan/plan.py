"""superstep plan: the best layouts of a model on a cluster, with what they cost and why."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from superstep.cli.arguments.plan_serve import read
from superstep.cli.new_file import require_new_file
from superstep.cli.options import read_flags
from superstep.cli.plan.calibrate import calibrate_on
from superstep.cli.plan.plan_text import (
    alternatives_text,
    explanation,
    fallback_text,
    header,
    jitter_text,
    narrowed_text,
    record,
    table,
)
from superstep.cli.plan.problem import problems
from superstep.cli.plan.survival_text import survival_record, survival_text
from superstep.cost.program.time.stragglers import Jitter
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.config_io import write_config
from superstep.planner.calibration.calibrate_observation import Guide, guide
from superstep.planner.calibration.published_row import step_slopes
from superstep.planner.failure_cost import Survival, survival
from superstep.planner.feasibility import check_problem, smallest, smallest_cluster
from superstep.planner.plan_summary import Figures, figures
from superstep.planner.price import pricing_of
from superstep.planner.search import SearchResult, Side
from superstep.planner.search_problem import SearchProblem
from superstep.planner.sensitivity import Fallback, Neighbour, fallbacks, improve, of_kinds, simplest
from superstep.planner.shortlist import fitting, search_fitting
from superstep.planner.simulate_best import Verified, straggled, verified

DESCRIPTION = (
    "Rank every layout of a model on a cluster before it runs. MODEL is a named size, a Hugging Face config.json or a "
    "run.toml. With --serve: what a server of it will do (superstep plan MODEL --serve --help)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan for, and what to tell."""

    cluster: str = ""
    """Chips and their number, 128xH100 say, or the path of a cluster's TOML file."""
    tokens: float | None = None
    """Tokens of the whole run: tells days, energy and price."""
    global_batch: int | None = None
    """Sequences in a step; none takes what the run.toml has, or about four million tokens."""
    sequence: int | None = None
    """Tokens of a sequence; none takes what the run.toml has, or the model's own, up to 8,192."""
    memory: float | None = None
    """GiB of a chip that a plan may fill; none takes all but the device's context and the communicators' buffers."""
    top: int = 5
    """Plans to show, each of another kind: of axes that are cut."""
    fix: tuple[str, ...] = ()
    """What is settled: plan.tp=4 plan.schedule=1f1b, or numerics.compute=bf16."""
    explain: bool = False
    """Show where the step and the memory of the best plan go."""
    fallback: int = 0
    """Show plans for one lost node, two, ... up to so many."""
    calibrate: tuple[str, ...] = ()
    """Runs of ours, published steps, measured machines (see the page on planning): fit the shares of peaks to them."""
    jitter: float | None = None
    """Spread of an operation's seconds, 0.05 say: sample how late the best plan's steps come."""
    slow_share: float = 0.0
    """Share of the chips that are a tenth slower for good; sampled as well."""
    mtbf: float | None = None
    """Hours between failures of one chip with its share of the host; none takes what is published of the chip."""
    price: float | None = None
    """Of a chip for an hour; none takes what the cluster's file has."""
    out: str | None = None
    """Write the best plan as a run.toml that trains."""
    json: str | None = None
    """Write the best plans and their alternatives as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """What was found for the options."""

    answer: SearchResult
    plans: tuple[Verified, ...]
    figures: tuple[Figures, ...]
    neighbours: tuple[Neighbour, ...]
    fallbacks: tuple[Fallback, ...]


def main(argv: Sequence[str]) -> int:
    """Print the best plans; with --serve, what a server will do."""
    if any(word in ("--serve", "--serve=true") for word in argv):
        return _serving(argv)
    has_model = bool(argv) and not argv[0].startswith("-")
    options = read_flags(
        PlanRequest(), argv[1:] if has_model else argv, prog="superstep plan MODEL", description=DESCRIPTION
    )
    _check(options, has_model=has_model)
    _check_files(options)
    problems_of_formats = problems(argv[0], options.cluster, options)
    known = guide()
    for each in options.calibrate:
        known, text = calibrate_on(Path(each), problems_of_formats[0].cluster, known)
        _say(text)
    problems_of_formats = [replace(problem, efficiency=known.efficiency) for problem in problems_of_formats]
    sides = check_sides(problems_of_formats)
    answer, plans = first_answer(sides, options)
    shown = of_kinds((simplest(plans), *plans))[: options.top]
    _say(header(problems_of_formats[0], answer))
    _say(table(shown, _figures(shown, options, known)))
    ranked = refine(sides, (answer, plans), options, known)
    if [each.run.plan for each in ranked.plans] != [each.run.plan for each in shown]:
        _say(f"Refined:\n{table(ranked.plans, ranked.figures)}")
    if options.calibrate:
        _say(narrowed_text(_narrowing(ranked.plans[0], known)))
    if ranked.neighbours:
        _say(alternatives_text(ranked.neighbours))
    _say(survival_text(_survival(ranked, options), problems_of_formats[0].cluster.chip.name))
    if options.explain:
        _say(explanation(ranked.plans[0]))
    if options.jitter is not None or options.slow_share:
        jitter = Jitter(spread=options.jitter or 0.0, slow_share=options.slow_share)
        _say(jitter_text(straggled(ranked.plans[0], jitter), jitter))
    if options.fallback:
        _say(fallback_text(ranked.fallbacks))
    _write(ranked, options)
    return 0


def _serving(argv: Sequence[str]) -> int:
    """``superstep plan --serve``: it measures this machine, so that it brings torch, and is imported here alone."""
    read(argv)  # help and mistakes need neither
    status: int = importlib.import_module("superstep.cli.plan.serve").main(argv)
    return status


def check_sides(problems_of_formats: Sequence[SearchProblem]) -> list[Side]:
    """The problem in each format with its prices; raises ConfigError where no layout divides it."""
    check_problem(problems_of_formats[0])
    return [Side(problem=problem, pricing=pricing_of(problem)) for problem in problems_of_formats]


def refine(
    sides: Sequence[Side], first: tuple[SearchResult, Sequence[Verified]], options: PlanRequest, known: Guide
) -> Ranked:
    """The programs of all that the search found, and of neighbours; ``known`` tells how far prices may be off."""
    answer, plans = first
    print("Refining:", end="", flush=True)
    done = {each.run.config.plan for each in plans}
    # The closed form is seldom above a program's price: what it puts behind the best program is.
    least = min(each.step_s for each in plans)
    near = (each for each in answer.best if each.step_s <= least)
    left = [each for each in near if each.plan.plan_config(0, each.side.problem) not in done]
    more = [verified(each) for each in left]
    priced = sorted((*plans, *fitting(more)), key=lambda plan: plan.step_s)
    best, beside = improve(priced[0], priced, tell=lambda name: print(f" {name}", end="", flush=True))
    print("\n")
    shown = of_kinds((best, *priced))[: options.top]
    return Ranked(
        answer=answer,
        plans=shown,
        figures=_figures(shown, options, known),
        neighbours=beside,
        fallbacks=tuple(fallbacks([side.problem for side in sides], options.fallback)),
    )


def _figures(plans: Sequence[Verified], options: PlanRequest, known: Guide) -> tuple[Figures, ...]:
    return tuple(figures(plan, options.tokens, options.price, narrowed=_narrowing(plan, known)) for plan in plans)


def _narrowing(plan: Verified, known: Guide) -> float:
    """What calibration leaves of the width of a plan's interval."""
    if known.covariance is known.before:
        return 1.0
    cluster = plan.found.side.problem.cluster
    return known.narrowed(step_slopes(plan.run, cluster, known.efficiency))


def first_answer(sides: Sequence[Side], options: PlanRequest) -> tuple[SearchResult, tuple[Verified, ...]]:
    """What the search found, and of each kind of plans the best by the closed form with the price of its program, the
    fastest first; of those whose programs fit.

    Raises:
        ConfigError: there is no plan; it says what would have one.
    """
    # More than are shown: their programs may rank otherwise than the closed form.
    answer = search_fitting(sides, keep=3 * options.top)
    if answer is None:
        raise _too_large(sides, options)
    return answer


def _too_large(sides: Sequence[Side], options: PlanRequest) -> ConfigError:
    least, problem = smallest(sides[0]), sides[0].problem
    chips = smallest_cluster(sides)
    mend = f"{chips} of these chips are enough" if chips else "more of these chips do not help"
    whose = "" if options.memory is not None else f" (what is a plan's of the memory of {problem.cluster.chip.name})"
    return ConfigError(
        f"--memory = {problem.memory_bytes / 2**30:.4g} GiB a chip{whose}: no plan fits on {problem.cluster.chips} "
        f"chips; the smallest takes about {least.bytes / 2**30:.3g} GiB and its communicators, most of it "
        f"{least.category}; {mend}."
    )


def _check(options: PlanRequest, *, has_model: bool) -> None:
    if not has_model:
        raise ConfigError("name a model, then any flags: superstep plan llama3-8b --cluster 64xH100.")
    if not options.cluster:
        raise ConfigError("--cluster is missing; set it to chips and their number, 64xH100 say, or to a TOML file.")
    above = {"--top": options.top, "--global-batch": options.global_batch, "--sequence": options.sequence}
    for name, value in above.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value} must be at least 1.")
    positive = {
        "--tokens": options.tokens,
        "--memory": options.memory,
        "--mtbf": options.mtbf,
        "--price": options.price,
    }
    for name, number in positive.items():
        if number is not None and not 0 < number < float("inf"):
            raise ConfigError(f"{name} = {number} must be above 0.")
    for name, share in {"--jitter": options.jitter, "--slow-share": options.slow_share}.items():
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"{name} = {share} must be between 0 and 1.")
    if options.fallback < 0:
        raise ConfigError(f"--fallback = {options.fallback} must be at least 0.")


def _check_files(options: PlanRequest) -> None:
    """Before the search, which may take a minute."""
    for name, file in {"--out": options.out, "--json": options.json}.items():
        if file is not None:
            require_new_file(name, Path(file))
    if options.out is not None and options.json is not None and Path(options.out) == Path(options.json):
        raise ConfigError(f"--out and --json = '{options.out}' are one file; name two.")


def _write(ranked: Ranked, options: PlanRequest) -> None:
    if options.out is None and ranked.plans[0].run.shape.is_priced_only:
        _say("--out run.toml writes the first of these as a file.")
    elif options.out is None:
        _say("--out run.toml writes the first of these as a file; then: superstep train run.toml")
    else:
        Path(options.out).write_text(write_config(run_of(ranked.plans[0], options.tokens)), encoding="utf-8")
        _say(f"written: {options.out}; train it with: superstep train {options.out}")
    if options.json is not None:
        written: dict[str, Any] = record(ranked.answer, ranked.plans, ranked.figures, ranked.neighbours)
        written["failures"] = survival_record(_survival(ranked, options))
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _survival(ranked: Ranked, options: PlanRequest) -> Survival | None:
    return survival(ranked.plans[0], None if options.mtbf is None else 1 / options.mtbf)


def run_of(plan: Verified, tokens: float | None) -> RunConfig:
    """The run that trains a plan, for as many steps as the tokens take."""
    config = plan.run.config
    if tokens is None:
        return config
    steps = -(-int(tokens) // plan.found.side.problem.batch_tokens)
    return replace(config, train=replace(config.train, steps=steps))


def _say(text: str) -> None:
    print(text, file=sys.stdout, flush=True)

"""superstep plan: the best layouts of a model on a cluster, with their costs and reasons."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superstep.cli.arguments.plan_serve import read
from superstep.cli.flags.new_file import require_new_file
from superstep.cli.flags.options import read_flags
from superstep.cli.plan.calibrate import calibrate_on
from superstep.cli.plan.plan_text import (
    alternatives_text,
    explanation,
    fallback_text,
    header,
    jitter_text,
    record,
    table,
    write_narrowed,
)
from superstep.cli.plan.survival_text import survival_record, survival_text
from superstep.cost.program.time.stragglers import Jitter
from superstep.errors import ConfigError
from superstep.plan.config_io import write_config
from superstep.planner.calibration.calibrate_observation import guide
from superstep.planner.ranking.plan_request import PlanRequest, check_request, problems
from superstep.planner.ranking.rank_layouts import PlanRanking, first_plans, refine
from superstep.planner.simulate_best import simulate_stragglers

DESCRIPTION = (
    "Rank every layout of a model on a cluster before it runs. MODEL is a named size, a Hugging Face config.json or a "
    "run.toml. With --serve, predict a server of the model (superstep plan MODEL --serve --help). With --encoder, "
    "rank the places of a run's encoder."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(PlanRequest):
    """Options of a plan."""

    explain: bool = False
    """Show where the step time and the memory of the best plan go."""
    calibrate: tuple[str, ...] = ()
    """Fit the shares of peak rates to these runs, published steps or measured machines (see the page on planning)."""
    jitter: float | None = None
    """Spread of an operation's seconds, such as 0.05: simulate the delays of the best plan's steps."""
    slow_share: float = 0.0
    """Share of the chips that are a tenth slower permanently; simulated as well."""
    out: str | None = None
    """Write the best plan to this file as a run.toml that trains."""
    json: str | None = None
    """Write the best plans and their alternatives to this file as JSON."""


def main(argv: Sequence[str]) -> int:
    """Print the best plans; with --serve, a server's forecast."""
    if any(word in ("--serve", "--serve=true") for word in argv):
        return _serving(argv)
    if any(word in ("--encoder", "--encoder=true") for word in argv):
        return _place_encoder(argv)
    has_model = bool(argv) and not argv[0].startswith("-")
    options = read_flags(
        RankOptions(), argv[1:] if has_model else argv, prog="superstep plan MODEL", description=DESCRIPTION
    )
    if not has_model:
        raise ConfigError("name a model, then any flags: superstep plan llama3-8b --cluster 64xH100.")
    check_request(options)
    _check(options)
    formats = problems(argv[0], options)
    known = guide()
    for each in options.calibrate:
        known, text = calibrate_on(Path(each), formats[0].cluster, known)
        _say(text)
    first = first_plans(formats, options, known)
    _say(header(first.sides[0].problem, first.answer))
    _say(table(first.plans, first.figures_of(first.plans)))
    print("Refining:", end="", flush=True)
    ranked = refine(first, tell=lambda name: print(f" {name}", end="", flush=True))
    print("\n")
    if [each.run.plan for each in ranked.plans] != [each.run.plan for each in first.plans]:
        _say(f"Refined:\n{table(ranked.plans, ranked.figures)}")
    if options.calibrate:
        _say(write_narrowed(first.narrowing(ranked.plans[0])))
    if ranked.neighbours:
        _say(alternatives_text(ranked.neighbours))
    _say(survival_text(ranked.survival, formats[0].cluster.chip.name))
    if options.explain:
        _say(explanation(ranked.plans[0]))
    if options.jitter is not None or options.slow_share:
        jitter = Jitter(spread=options.jitter or 0.0, slow_share=options.slow_share)
        _say(jitter_text(simulate_stragglers(ranked.plans[0], jitter), jitter))
    if options.fallback:
        _say(fallback_text(ranked.fallbacks))
    _write(ranked, options)
    return 0


def _serving(argv: Sequence[str]) -> int:
    """``superstep plan --serve``: it measures this machine, so it needs torch, and is imported only here."""
    read(argv)  # help and mistakes need neither
    status: int = importlib.import_module("superstep.cli.plan.serve").main(argv)
    return status


def _place_encoder(argv: Sequence[str]) -> int:
    """``superstep plan --encoder``, which measures this machine too."""
    status: int = importlib.import_module("superstep.cli.plan.encoder").main(argv)
    return status


def _check(options: RankOptions) -> None:
    """Check before the search, which may take a minute."""
    for name, share in {"--jitter": options.jitter, "--slow-share": options.slow_share}.items():
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"{name} = {share} must be between 0 and 1.")
    for name, file in {"--out": options.out, "--json": options.json}.items():
        if file is not None:
            require_new_file(name, Path(file))
    if options.out is not None and options.json is not None and Path(options.out) == Path(options.json):
        raise ConfigError(f"--out and --json = '{options.out}' are one file; name two.")


def _write(ranked: PlanRanking, options: RankOptions) -> None:
    if options.out is None and ranked.plans[0].run.shape.is_priced_only:
        _say("--out run.toml writes the first of these as a file.")
    elif options.out is None:
        _say("--out run.toml writes the first of these as a file; then: superstep train run.toml")
    else:
        Path(options.out).write_text(write_config(ranked.best), encoding="utf-8")
        _say(f"written: {options.out}; train it with: superstep train {options.out}")
    if options.json is not None:
        written: dict[str, Any] = record(ranked.answer, ranked.plans, ranked.figures, ranked.neighbours)
        written["failures"] = survival_record(ranked.survival)
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    print(text, file=sys.stdout, flush=True)

"""Blocks of the page on the planner: the fitted constants, and how near published runs come."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from layout_blocks import table

from superstep.cost.closed.efficiency import CONSTANTS

PUBLISHED = Path(__file__).parent.parent / "bench" / "results" / "published.json"


def _constants() -> str:
    rows = [
        (f"`{name}`", f"{each.value:.4g}", f"{each.before:.4g}", each.fitted_on or "nothing")
        for name, each in CONSTANTS.items()
    ]
    return table(("constant", "in use", "before", "fitted on"), rows)


def _accuracy() -> str:
    told = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    each = {f"step time, {name}": found for name, found in told["summary"].items()} | {"peak memory": told["memory"]}
    rows = [(name, str(found["rows"]), f"{found['median']:.1%}", f"{found['p90']:.1%}") for name, found in each.items()]
    return table(("prediction", "rows", "median error", "90th percentile"), rows)


def _sources() -> str:
    sources = json.loads(PUBLISHED.read_text(encoding="utf-8"))["sources"]
    rows = [
        (f"`{name}`", str(found["rows"]), f"{found['median']:.1%}", f"{found['p90']:.1%}")
        for name, found in sources.items()
    ]
    return table(("source", "rows", "median error", "90th percentile"), rows)


def _fits() -> str:
    told = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    spearman = sorted(each["spearman"] for each in told["sweeps"])[len(told["sweeps"]) // 2]
    lost = sorted(each["loss"] for each in told["sweeps"])[len(told["sweeps"]) // 2]
    fits, sweeps = told["fits"], len(told["sweeps"])
    return (
        f"Of {fits['rows']} layouts, of which more than half did not fit, {fits['right']:.1%} are rightly said to fit "
        f"or not. In {sweeps} sweeps of one model on one cluster the median rank correlation of predicted and "
        f"published step times is {spearman:.2f}, and in the median the plan predicted to be fastest "
        f"is {lost:.1%} slower than the fastest published one."
    )


PLANNER_BLOCKS: dict[str, Callable[[], str]] = {
    "constants": _constants,
    "published accuracy": _accuracy,
    "published sources": _sources,
    "published fits": _fits,
}

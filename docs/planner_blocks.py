"""Blocks of the page on the planner: the fitted constants, how near published runs come, what each mechanism does."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layout_blocks import table
from superstep.cost.closed.constants import CONSTANTS
from superstep.planner.goodput import (
    DISK_BYTES_PER_S,
    Hazard,
    ettr,
    mtbf_s,
    recommend,
    simulate,
    without_snapshots,
)

PUBLISHED = Path(__file__).parent.parent / "bench" / "results" / "published.json"


LLAMA_3 = 419 / (54 * 24 * 16_384)
"""Failures of one chip in an hour (Dubey 2024, 3.3.4)."""

WITHIN = 1.2816
"""Standard deviations to either side that hold 80%."""


def _told() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return told


def _constants() -> str:
    rows = []
    for name, each in CONSTANTS.items():
        around = f"x/÷ {math.exp(WITHIN * each.error):.2f}" if each.error else ""
        stacks = f"{len(each.stacks)}{', rests on one' if each.is_alone else ''}" if each.rows else "nothing"
        rows.append((f"`{name}`", f"{each.value:.4g}", around, f"{each.before:.4g}", str(each.rows), stacks))
    return table(("constant", "in use", "80% interval", "before", "rows", "stacks"), rows)


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _accuracy() -> str:
    told = _told()
    lines: dict[str, dict[str, Any]] = told["summary"]
    unseen = [name for name in lines if name.startswith(("each stack", "that, ", "constant", "Calculon"))]
    each = {f"step time, {name}": lines[name] for name in unseen}
    each["peak memory, each stack's own name unknown"] = told["memory_left_out"]
    each |= {f"step time, {name}, fitted": found for name, found in lines.items() if name not in unseen}
    each["peak memory, names known"] = told["memory"]
    rows = [
        (name, str(found["rows"]), _percent(found["median"]), _percent(found["p90"])) for name, found in each.items()
    ]
    return table(("prediction", "rows", "median error", "90th percentile"), rows)


def _sources() -> str:
    told = _told()
    rows = []
    for name, found in told["sources"].items():
        out = told["sources_left_out"][name]
        medians = (_percent(out["median"]), _percent(out["p90"]), _percent(found["median"]), _percent(found["p90"]))
        rows.append((f"`{name}`", str(found["rows"]), *medians))
    return table(("source", "rows", "left out: median", "90th percentile", "fitted: median", "90th percentile"), rows)


def _fits() -> str:
    told = _told()
    known, unknown = told["fits"], told["fits_left_out"]
    sweeps, out = told["sweeps"], told["sweeps_left_out"]
    inside = told["intervals"]
    stacks = inside["by_stack"].values()
    return (
        f"Of {known['rows']:,} layouts, of which {known['out']:,} did not fit, {known['right']:.1%} are rightly said "
        f"to fit or not: {known['false_alarms']} that ran are refused, {known['missed']} that failed are let through. "
        f"Where a stack's own name is not known it is {unknown['right']:.1%}, with {unknown['false_alarms']} and "
        f"{unknown['missed']}. In {len(out)} sweeps of one model on one cluster, left out, the median rank correlation "
        f"of predicted and published step times is {_median(out, 'spearman'):.2f} ({_mean(out, 'spearman'):.2f} in the "
        f"mean), and the plan that is taken, of those within 2% the simplest, is {_mean(out, 'loss'):.1%} slower in "
        f"the mean than the fastest published one; fitted, {_median(sweeps, 'spearman'):.2f} and "
        f"{_mean(sweeps, 'loss'):.1%}. 80% intervals, each from the other stacks' residuals, hold "
        f"{sum(stacks) / len(stacks):.1%} of a left-out stack's rows in the mean over stacks, {inside['judged']:.1%} "
        f"of all judged rows, {inside['covered']:.1%} with plans that have something unstated, and "
        f"{inside['but_largest']:.1%} of those but the largest stack's. Those of peak memory hold "
        f"{told['memory_interval']['covered']:.1%}, where names are known."
    )


def _after_row() -> str:
    told = _told()
    found, inside = told["after_row"], told["after_row"]["inside"]
    halves = found["of_halves"]
    return (
        f"The rows of the table above are then inside in {inside['any']:.0%} (any row), {inside['middle']:.0%} (the "
        f"middle one) and {inside['alike']:.0%} (the one most alike). Which row is in the middle is chance: it is "
        f"another one of each half of a table, and over random halves the median error after it is "
        f"{halves['mean']:.1%} in the mean, and {halves['low']:.1%} to {halves['high']:.1%} for 80% of them. After any "
        f"row it is at best {found['any_in_hindsight']:.1%} for rules that scale a table by what one row of it tells: "
        "with hindsight, each table taking off the share of the row's deviation that suits it."
    )


def _stated() -> str:
    rows = [
        (words, _percent(each["right"]), str(each["false_alarms"]), str(each["missed"]),
         _percent(each["median"]), _percent(each["p90"]))
        for words, each in _told()["stated"].items()
    ]  # fmt: skip
    columns = ("told", "fits or not", "ran, refused", "failed, let through", "peaks: median", "90th percentile")
    return table(columns, rows)


def _median(sweeps: list[dict[str, float]], what: str) -> float:
    return sorted(each[what] for each in sweeps)[len(sweeps) // 2]


def _mean(sweeps: list[dict[str, float]], what: str) -> float:
    return sum(each[what] for each in sweeps) / len(sweeps)


def _ablations() -> str:
    rows = [
        (
            name,
            *(_percent(median) for median in each["tables"].values()),
            *map(_percent, (each["left_out"], each["ninth"], each["regret"])),
            *((str(each["moved"]), *map(_percent, (each["moved_with"], each["moved_without"])))
              if each["moved"] else ("", "", "")),
        )
        for name, each in _told()["ablations"].items()
    ]  # fmt: skip
    columns = (
        "taken away",
        "`runs.csv`, fitted",
        "`runs_2.csv`, fitted",
        "all, each stack left out",
        "90th percentile",
        "regret",
        "rows it moves",
        "these left out, with it",
        "without",
    )
    return table(columns, rows)


def _memory_ablations() -> str:
    rows = []
    for name, each in _told()["memory_ablations"].items():
        named, unknown = (
            (
                _percent(one["right"]),
                f"{one['false_alarms']}, {one['missed']}",
                _percent(one["median"]),
                _percent(one["p90"]),
            )
            for one in (each["named"], each["unknown"])
        )
        rows.append((name, *named, *unknown))
    known = ("fits or not", "refused, let through", "peaks: median", "90th percentile")
    return table(("taken away", *known, *(f"{words}, name unknown" for words in known)), rows)


def _refused() -> str:
    counts = Counter((each["row_id"].rsplit("-", 1)[0], _reason(each["why"])) for each in _told()["refused"])
    rows = [(f"`{source}`", str(count), why) for (source, why), count in counts.items()]
    return table(("source", "rows", "why"), rows)


def _reason(why: str) -> str:
    return "dp·tp·pp·cp is not the number of chips" if "n_gpus" in why and "·pp·" in why else why


def _shares() -> str:
    rows = [
        (f"{each['from']:.0%} to {each['to']:.0%}" if each["to"] < 2 else "more", str(each["rows"]),
         str(each["out"]), _percent(each["out"] / each["rows"]))
        for each in _told()["fits_by_share"]
    ]  # fmt: skip
    return table(("predicted to take of the memory", "layouts", "out of memory", "share"), rows)


def _goodput() -> str:
    """Closed form and simulation, for one state on more and more chips."""
    rows = []
    for chips in (64, 512, 4096, 16_384, 100_000):
        hosts, state_bytes = chips / 8, 5e12
        flush_s = state_bytes / (hosts * DISK_BYTES_PER_S)
        hazard = Hazard(mtbf_s=mtbf_s(chips, LLAMA_3), read_s=flush_s)
        found = recommend(hazard, step_s=10, copy_s=state_bytes / chips / 25e9, flush_s=flush_s)
        plain = without_snapshots(hazard, step_s=10, flush_s=flush_s)
        drawn = [simulate(hazard, each, failures=20_000, seed=1) for each in (found, plain)]
        rows.append(
            (
                f"{chips:,}",
                f"{hazard.mtbf_s / 3600:.3g} hours",
                f"{found.snapshot_s / 10:.0f}, {found.save_s / 10:,.0f}",
                f"{ettr(hazard, found):.2%} ({drawn[0]:.2%})",
                f"{plain.save_s / 10:,.0f}",
                f"{ettr(hazard, plain):.2%} ({drawn[1]:.2%})",
            )
        )
    names = (
        *("chips", "one failure every", "steps between snapshots, saves", "ETTR (simulated)"),
        *("steps between saves, no snapshots", "ETTR (simulated)"),
    )
    return table(names, rows)


def _experts() -> str:
    told: dict[str, Any] = json.loads((PUBLISHED.parent / "plan_experts.json").read_text(encoding="utf-8"))
    rows = []
    for name, each in told["cases"].items():
        plan = " ".join(f"{field}={value}" for field, value in each["plan"].items())
        theirs, ours = each["for_theirs"], each["for_ours"]
        before = theirs["meshes_before"]
        rank = f"more than {told['keep'] - 1}" if before is None else str(before)
        seconds = f"{theirs['step_s']:.1f} s" + (f" / {each['measured_s']:.1f} s" if each["measured_s"] else "")
        rows.append((name, plan, each["source"], seconds, rank, _percent(theirs["gain"]), _percent(ours["gain"])))
    names = ("model", "published plan", "source", "a step, predicted / published", "faster meshes", "gain of the best")
    return table((*names, "gain for our kernels"), rows)


PLANNER_BLOCKS: dict[str, Callable[[], str]] = {
    "constants": _constants,
    "published accuracy": _accuracy,
    "published stated": _stated,
    "published sources": _sources,
    "published fits": _fits,
    "published ablations": _ablations,
    "published memory ablations": _memory_ablations,
    "published after a row": _after_row,
    "published refused": _refused,
    "published shares": _shares,
    "goodput": _goodput,
    "experts": _experts,
}

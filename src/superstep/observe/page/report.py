"""The report of runs as one page: curves, a step's time by use, events, settings.

It is made from metrics.jsonl and run.toml of a run directory, so it can be written at any time, on any machine. Several
runs are drawn over one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from superstep.observe.page.bundle_html import assemble, pack
from superstep.observe.page.compare import Comparison
from superstep.observe.page.metric_charts import charts_of
from superstep.observe.page.predicted_vs_measured import ledger, traffic
from superstep.observe.router_balance import busiest
from superstep.program.timeline import Timeline

COLUMNS = ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "data_s", "mfu", "memory_bytes", "tokens_seen")
MOST_POINTS = 4000
"""The most points of a curve: more than a screen's columns, so that a long run keeps its extremes."""
STARTED = (
    "plan",
    "parameters",
    "world",
    "transport",
    "steps",
    "unigram_entropy",
    "predicted_step_s",
    "memory",
    "counts",
)
FORETOLD = ("predicted_memory_bytes", "predicted_spent_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """One run.

    Attributes:
        lines: the objects of its metrics.jsonl, in order.
        samples: the objects of its samples.jsonl: texts after checkpoints.
        settings: the text of its run.toml.
        ran: a recorded step.
        fault: why it failed, if it did.
        damage: which lines cannot be read, if any.
        facts: further facts, such as hardware and versions.
    """

    name: str
    lines: Iterable[Mapping[str, Any]]
    samples: Iterable[Mapping[str, Any]] = ()
    settings: str = ""
    ran: Timeline | None = None
    fault: str = ""
    damage: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)


def report_page(runs: Sequence[ReportedRun], comparisons: Sequence[Comparison] = (), *, is_live: bool = False) -> str:
    """The page; each further run is compared with the first. A live page asks its server for more, which answers with
    ``pack_runs``.
    """
    title = runs[0].name if len(runs) == 1 else "Compared: " + ", ".join(run.name for run in runs)
    return assemble(
        markup="report.html",
        styles=["assets/step.css", "assets/report.css", "vendor/uPlot.min.css"],
        libraries=["vendor/uPlot.iife.min.js"],
        scripts=["format.js", "curves.js", "report.js"],
        title=title,
        data={
            "format": 1,
            "runs": pack_runs(runs),
            "comparisons": [one.value() for one in comparisons],
            "is_live": is_live,
        },
    )


def pack_runs(runs: Sequence[ReportedRun]) -> str:
    """The page's data on one line."""
    return pack({"runs": [run_value(run) for run in runs]})


def run_value(run: ReportedRun) -> dict[str, Any]:
    """The script's data of one run."""
    lines = list(run.lines)
    started: dict[str, Any] = {}
    for line in lines:
        if line["event"] == "started":
            started = {key: line.get(key) for key in (*STARTED, *FORETOLD)}
    steps = [line for line in lines if line["event"] == "step"]
    evaluated = [line for line in lines if line["event"] == "evaluated"]
    drawn = thin_steps(steps)
    is_sampled = any(line["event"] == "rolled" for line in lines)
    ran = {} if run.ran is None else split_step(run.ran)
    spent = {"ran": ran, "predicted": started.get("predicted_spent_s") or {}}
    damaged = [[0, "damaged", run.damage]] if run.damage else []
    return {
        "name": run.name,
        "started": started,
        "step": [line["step"] for line in drawn],
        "columns": {name: [line.get(name) for line in drawn] for name in COLUMNS},
        "steps": len(steps),
        "evaluated": {
            key: [line.get(key) for line in evaluated] for key in ("step", "loss", "bits_per_byte", "accuracy")
        },
        "router": _router([line for line in lines if line["event"] == "router"]),
        "layouts": layout_changes(lines),
        "events": [*damaged, *(list(event) for event in _events(lines, run.fault))],
        "totals": _totals(lines, steps, "sampling" if is_sampled else "data"),
        "spent": {name: parts for name, parts in spent.items() if parts},
        "waited": "its sampling" if is_sampled else "its wait for data",
        "ledger": [row.value() for row in ledger(lines, ran)],
        "traffic": traffic(lines),
        "measures": charts_of(lines),
        "samples": _samples(run.samples),
        "settings": run.settings,
        "facts": dict(run.facts),
    }


def thin_steps(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The newest step, and at most ``MOST_POINTS``: of each stretch, the highest and the lowest loss."""
    if len(steps) <= MOST_POINTS:
        return list(steps)
    kept: list[Mapping[str, Any]] = []
    pieces = MOST_POINTS // 2
    for k in range(pieces):
        piece = steps[k * len(steps) // pieces : (k + 1) * len(steps) // pieces]
        # A loss that is not finite is told as none.
        losses = [(float("inf") if line["loss"] is None else line["loss"], at) for at, line in enumerate(piece)]
        kept += [piece[at] for at in sorted({min(losses)[1], max(losses)[1]})]
    # What the run has come to is told of the newest.
    return kept if kept[-1] is steps[-1] else [*kept, steps[-1]]


def _events(lines: Iterable[Mapping[str, Any]], fault: str) -> Iterable[tuple[int, str, str]]:
    """Step, kind and words of events besides steps, and of the final fault."""
    step, is_over, counted = 0, False, "tokens"
    for line in lines:
        counted = line.get("counts", counted)
        step, is_over = line.get("step") or 0, line["event"] in ("finished", "stopped")
        match line["event"]:
            case "started":
                yield step, "started", f"{line.get('world')} ranks, {line.get('plan')}"
            case "resumed":
                lost = f"; lost: {line['lost']}" if line.get("lost") else ""
                yield step, "resumed", f"{line.get('path') or 'from memory or the start'}{lost}"
            case "evaluated":
                yield step, "validation", f"loss {line['loss']:.4f}" if line["loss"] is not None else "no finite loss"
            case "saved":
                yield step, "saved", f"{line['path']}, {line['seconds']:.3g} s, {line['bytes'] / 2**20:.4g} MiB"
            case "warning":
                yield step, "warning", str(line["text"])
            case "retried":
                yield step, "retried", str(line.get("why", ""))
            case "rolled_back":
                yield step, "rolled back", f"before step {line['refused']}: {line['why']}"
            case "corrupted":
                ranks = ", ".join(map(str, line["ranks"]))
                yield step, "corrupted", f"{line['what']} on rank {ranks}, found after step {line['found']}"
            case "finished" | "stopped":
                yield step, str(line["event"]), f"after {line['elapsed_s']:.4g} s, {line['tokens_seen']:,} {counted}"
    if fault and not is_over:
        yield step, "fault", fault


def layout_changes(lines: Iterable[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Steps after which a resumed run used another layout, with the layout."""
    changes: list[tuple[int, str]] = []
    step, layout = 0, None
    for line in lines:
        match line["event"]:
            case "step":
                step = line["step"]
            case "started":
                if layout not in (None, line.get("plan")):
                    changes.append((step, str(line.get("plan"))))
                layout = line.get("plan")
    return changes


def _totals(lines: Iterable[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], waited: str) -> dict[str, float]:
    """Seconds of the whole run by use; ``waited`` names what steps waited for."""
    totals = {"steps": 0.0, waited: 0.0, "validation": 0.0, "checkpoints": 0.0}
    for line in steps:
        totals["steps"] += line["step_s"] - line["data_s"]
        totals[waited] += line["data_s"]
    for line in lines:
        if line["event"] in ("evaluated", "saved"):
            totals["validation" if line["event"] == "evaluated" else "checkpoints"] += line["seconds"]
    return totals


def split_step(timeline: Timeline) -> dict[str, float]:
    """A step in parts that add up, as means over the ranks."""
    spent = timeline.measure_uses()
    ranks = len(spent)
    parts = {"compute": sum(one.busy_s for one in spent) / ranks}
    for lane in spent[0].exposed_s:
        if exposed_s := sum(one.exposed_s[lane] for one in spent) / ranks:
            parts[f"waits for {lane}"] = exposed_s
    parts["bubble"] = sum(one.bubble_s for one in spent) / ranks
    return parts


def _samples(lines: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """Step, text, and whether the text is an error; the newest first. A repeated step counts once, the later one."""
    by_step = {line["step"]: [line["step"], line.get("text", line.get("why", "")), "why" in line] for line in lines}
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def _router(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For each report and layer, the busiest expert's load over the even load."""
    if not lines:
        return {}
    loads = [[busiest(layer) for layer in line["chosen"]] for line in lines]
    return {"step": [line["step"] for line in lines], "busiest": [list(layer) for layer in zip(*loads, strict=True)]}

"""Where each measured figure comes from: its file, the command that makes it, the machine and the day."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from layout_blocks import RESULTS, table


@dataclass(frozen=True, slots=True)
class Figure:
    """A file of results.

    Attributes:
        what: it holds.
        command: that makes it anew.
        date: on which it was taken.
    """

    what: str
    command: str
    date: str


FIGURES: dict[str, Figure] = {
    "train_vs_peers-4096-amx.json": Figure("training beside peers, AMX", "bench.train_vs_peers", "2026-11-24"),
    "train_vs_peers-4096.json": Figure("training beside peers", "bench.train_vs_peers", "2026-11-23"),
    "train_vs_peers-32000-amx.json": Figure("the same, vocabulary 32,000, AMX", "bench.train_vs_peers", "2026-11-24"),
    "train_vs_peers-32000.json": Figure("the same, vocabulary 32,000", "bench.train_vs_peers", "2026-11-23"),
    "waterfall-amx.json": Figure("where a step's time goes, AMX", "bench.waterfall", "2026-11-24"),
    "waterfall.json": Figure("where a step's time goes", "bench.waterfall", "2026-11-23"),
    "kernels-amx.json": Figure("attention, products, gradients beside torch, AMX", "bench.kernels", "2026-11-24"),
    "kernels-amd-epyc.json": Figure("attention and products beside torch", "bench.kernels", "2026-11-23"),
    "kernels.json": Figure("attention and products beside torch", "bench.kernels", "2026-11-23"),
    "kernels_fused.json": Figure("norms, gates and loss beside torch", "bench.kernels_fused", "2026-11-23"),
    "exact_cost-amx.json": Figure("exact beside fast mode, AMX", "bench.exact_cost", "2026-11-24"),
    "exact_cost.json": Figure("exact beside fast mode", "bench.exact_cost", "2026-11-23"),
    "long_context.json": Figure("the longest sequence within a budget", "bench.long_context", "2026-11-23"),
    "long_context-8192.json": Figure("8,192 tokens, one rank and two", "bench.long_context", "2026-11-23"),
    "long_context-32768.json": Figure("32,768 tokens, one rank and two", "bench.long_context", "2026-11-23"),
    "moe.json": Figure("a mixture of experts beside a dense model", "bench.moe", "2026-11-21"),
    "tolerance.json": Figure("distances between layouts", "bench.tolerance", "2026-11-21"),
    "collectives.json": Figure("collectives in shared memory beside Gloo", "bench.collectives", "2026-11-22"),
    "collectives-hosts.json": Figure("collectives over hosts beside Gloo", "bench.collectives", "2026-11-23"),
    "recorder.json": Figure("what the flight recorder costs", "bench.recorder", "2026-11-23"),
    "serve_vs_peers.json": Figure("serving beside peers", "bench.serve_vs_peers", "2026-11-22"),
    "serve_http.json": Figure("what HTTP costs", "bench.serve_http", "2026-11-22"),
    "serve_predicted.json": Figure("a server foreseen", "bench.serve_predicted", "2026-11-22"),
    "serve_predicted-exact.json": Figure("an exact server foreseen", "bench.serve_predicted", "2026-11-22"),
    "serve_quantized.json": Figure("perplexity of quantized weights", "bench.serve_quantized", "2026-11-22"),
    "tune_vs_peers.json": Figure("reinforcement learning beside TRL", "bench.tune_vs_peers", "2026-11-22"),
    "tune_memory.json": Figure("memory of tuning, foreseen and measured", "bench.tune_memory", "2026-11-22"),
    "learns.json": Figure("what rewards teach, three seeds", "bench.learns", "2026-11-22"),
    "grades.json": Figure("grades a second", "bench.grades", "2026-11-22"),
    "faults.json": Figure("kills and flips", "bench.faults", "2026-11-22"),
    "stopped.json": Figure("how soon a stopped rank is named", "bench.stopped", "2026-11-22"),
    "snapshots.json": Figure("what a snapshot costs", "bench.snapshots", "2026-11-23"),
    "soak.json": Figure("20 minutes of faults, 20 without", "bench.soak", "2026-11-23"),
    "hosts.json": Figure("lost hosts and links", "bench.hosts", "2026-11-23"),
    "step_page.json": Figure("the page of a large step", "bench.step_page", "2026-11-23"),
    "local_prediction.json": Figure("steps foreseen and measured", "bench.local_prediction", "2026-11-24"),
    "plan_search.json": Figure("how fast plans are searched", "bench.plan_search", "2026-11-22"),
    "plan_experts.json": Figure("plans of experts beside the planner's", "bench.plan_experts", "2026-11-23"),
    "published.json": Figure("published runs foreseen", "bench.published", "2026-11-23"),
    "published_blind.json": Figure("predictions before any comparison", "bench.published_blind", "2026-11-22"),
    "published_unseen.json": Figure(
        "published runs that nothing was learned from", "bench.published_unseen", "2026-11-24"
    ),
}


def _machine(path: Path) -> str:
    told = json.loads(path.read_text(encoding="utf-8"))
    if "cpu" not in told:
        return "any: computed from published tables"
    amx = ", AMX" if told.get("amx") else ""
    torch = f", torch {told['torch']}" if "torch" in told else ""
    return f"{told['cores']} cores of {told['cpu']}{amx}{torch}"


def _figures() -> str:
    rows = []
    for name, each in FIGURES.items():
        link, command = f"[{name}](../../bench/results/{name})", f"`python -m {each.command}`"
        rows.append((link, each.what, command, _machine(RESULTS / name), each.date))
    return table(("file", "what it holds", "command", "machine", "taken"), rows)


FIGURES_BLOCKS: dict[str, Callable[[], str]] = {"figures": _figures}

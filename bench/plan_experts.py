"""Plans that experts published, among ours: how many meshes ours puts before theirs, and the gain that it promises.

Of a published plan the degrees, and what else is told, are kept; what is not told is set as our search sets it best.
Their plans were made for their software. So all plans are priced by the closed form twice: for that software, as its
papers and recipes state it, with the schedules that it has; and for Superstep's own kernels. A mesh counts by the best
plan on it, and as faster where it is so by more than a tie (``planner.tie_break``).

    python -m bench.plan_experts
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.machine import write_result
from superstep.cost.closed.estimate import Estimate
from superstep.cost.closed.framework import Software, price_of
from superstep.cost.closed.framework_memory import keeping_of
from superstep.cost.closed.known_frameworks import shorthand
from superstep.cost.closed.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, USABLE
from superstep.hardware.cluster_file import cluster
from superstep.plan.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from superstep.planner.price import pricing_of
from superstep.planner.search import PricedPlan, PricedProblem, search
from superstep.planner.search_problem import Rule, SearchProblem
from superstep.planner.tie_break import TIE

KEEP = 60
"""Meshes that are known in order; a plan behind all of them is told as such."""


def without(field: str, *values: object) -> tuple[Rule, ...]:
    """That a software does not have these values of a field."""
    return tuple(Rule(field, value, is_wanted=False) for value in values)


NO_ZERO_BUBBLE = without("schedule", "zb-h1", "zb-v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """A published plan.

    Attributes:
        plan: the fields of ``[plan]`` that are told.
        model_name: as ``superstep plan`` has it.
        source: where it was published; or what it is, where it was not.
        software: that it was made for, as its source states it.
        lacks: what this software does not have.
        measured_s: a step, as published; None where it was not.
        measured: where that is from.
    """

    model_name: str
    chips: str
    batch: int
    sequence: int
    plan: Mapping[str, object] = field(default_factory=dict)
    source: str
    software: Software
    lacks: tuple[Rule, ...]
    measured_s: float | None = None
    measured: str = ""


META = Software(attention="flash-3")
"""Llama 3 (Dubey 2024, sec. 3.3): gradients accumulated and reduced in fp32, parameters and gradients moved beside
compute, parameters not sharded again before the backward pass. Its attention is not told; at 131k tokens nothing slower
than kernels written for the chip reaches what it publishes."""

EXPERTS: dict[str, Expert] = {
    "Llama 3 405B, 8k": Expert(
        model_name="llama3.1-405b",
        chips="16384xH100",
        batch=2048,
        sequence=8192,
        plan={"tp": 8, "cp": 1, "pp": 16, "dp": 128},
        source="Dubey 2024, table 4 and sec. 3.3.2",
        software=META,
        lacks=(*NO_ZERO_BUBBLE, *without("zero", 3)),
        measured_s=6.5,
        measured="400 TFLOP/s a chip, causal attention counted",
    ),
    "Llama 3 405B, 131k": Expert(
        model_name="llama3.1-405b",
        chips="16384xH100",
        batch=128,
        sequence=131072,
        plan={"tp": 8, "cp": 16, "pp": 16, "dp": 8},
        source="Dubey 2024, table 4",
        software=META,
        lacks=(*NO_ZERO_BUBBLE, *without("zero", 3)),
        measured_s=10.9,
        measured="380 TFLOP/s a chip, causal attention counted",
    ),
    "DeepSeek-V3": Expert(
        model_name="deepseek-v3",
        chips="2048xH800",
        batch=15360,
        sequence=4096,
        plan={"pp": 16, "ep": 64, "tp": 1, "cp": 1, "zero": 1},
        source="DeepSeek-AI 2024, sec. 3.2",
        software=Software(
            compute="fp8",
            attention="flash-3",
            overlaps_experts=True,
            sends_once=True,
            # Norms, SwiGLU and the products out of the narrow widths are computed again (sec. 3.2.3), inputs of SwiGLU
            # and of experts kept in 8 bits (sec. 3.3.3): of 372 KB a token and layer that products gave, 142.
            holds=replace(Software().holds, selects_products=0.4),
        ),
        lacks=(),
        measured_s=19.9,
        measured="180,000 chip hours for 1e12 tokens, its second head with it",
    ),
    "Qwen3-235B": Expert(
        model_name="qwen3-235b-a22b",
        chips="256xH100",
        batch=2048,
        sequence=4096,
        plan={"tp": 2, "pp": 8, "ep": 32, "cp": 1, "microbatch": 1},
        source="Megatron Bridge 25.11, its recipe for 256 H100 in fp8",
        software=replace(
            shorthand("Megatron-Bridge 25.11", 2025.8).software,
            compute="fp8",
            attention="flash-3",
            overlaps_data=True,
            overlaps_tensor=True,
            overlaps_experts=True,
        ),
        lacks=(*NO_ZERO_BUBBLE, *without("schedule", "gpipe", "breadth-first")),
        measured_s=20.8,
        measured="megatron_bridge_2025-032",
    ),
    "70B on 24 A100": Expert(
        model_name="llama3-70b",
        chips="24xA100",
        batch=192,
        sequence=4096,
        plan={"dp": 24, "tp": 1, "pp": 1, "cp": 1, "zero": 3, "recompute": "full"},
        source="usual practice: FSDP over all chips, everything computed again",
        software=shorthand("transformers, FSDP", 2024.0).software,
        lacks=NO_ZERO_BUBBLE,
    ),
}


def problem_of(expert: Expert) -> SearchProblem:
    """What the expert planned for."""
    found = cluster(expert.chips)
    base = RunConfig(
        model=ModelConfig(name=expert.model_name),
        data=DataConfig(sequence_tokens=expert.sequence),
        train=TrainConfig(batch_sequences=expert.batch),
    )
    memory = USABLE * found.chip.memory_bytes - CONTEXT_BYTES - COMMUNICATOR_BYTES
    return SearchProblem(base=base, cluster=found, compute="bf16", memory_bytes=memory)


def told(found: PricedPlan) -> dict[str, object]:
    """A plan as its fields."""
    return asdict(found.plan.plan_config(0, found.side.problem))


def for_software(side: PricedProblem, expert: Expert) -> PricedProblem:
    """The plans that the expert's software can run, at its prices."""
    rates, stack = price_of(side.problem.cluster, expert.software)
    pricing = replace(side.pricing, rates=rates, stack=stack, keeping=keeping_of(expert.software.holds))
    return PricedProblem(problem=replace(side.problem, rules=expert.lacks), pricing=pricing)


def ranked(side: PricedProblem, expert: Expert) -> dict[str, object]:
    """Ours and theirs at one software's prices."""
    rules = tuple(Rule(name, value) for name, value in expert.plan.items())
    theirs = replace(side, problem=replace(side.problem, rules=(*side.problem.rules, *rules)))
    kept = search([theirs], keep=1).best if len(theirs.space.cores()) else ()
    start = time.process_time()
    best = search([side], keep=KEEP).best
    seconds = time.process_time() - start
    if not kept:
        return {"why": "does not fit, or is not in the space", "best_step_s": best[0].step_s, "ours": told(best[0])}
    before = sum(each.step_s * (1 + TIE) < kept[0].step_s for each in best)
    return {
        "meshes_before": before if before < len(best) else None,
        "gain": kept[0].step_s / best[0].step_s - 1,
        "step_s": kept[0].step_s,
        "best_step_s": best[0].step_s,
        "parts": parts(kept[0].parts),
        "best_parts": parts(best[0].parts),
        "theirs": told(kept[0]),
        "ours": told(best[0]),
        "search_s": seconds,
    }


def parts(found: Estimate) -> dict[str, float]:
    """Seconds of a step, by part."""
    return {name: round(float(value), 3) for name, value in asdict(found).items()}


def _short(value: object) -> object:
    """A plan without what it leaves as it is."""
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if each not in (1, 0, None, False, "ring", ())}


def main() -> None:
    """Rank, print and write."""
    argparse.ArgumentParser(prog="python -m bench.plan_experts", description=__doc__).parse_args()
    rows: dict[str, object] = {}
    for name, expert in EXPERTS.items():
        problem = problem_of(expert)
        side = PricedProblem(problem=problem, pricing=pricing_of(problem))
        rows[name] = row = {
            "source": expert.source,
            "plan": dict(expert.plan),
            "measured_s": expert.measured_s,
            "measured": expert.measured,
            "for_theirs": ranked(for_software(side, expert), expert),
            "for_ours": ranked(side, expert),
        }
        print(name, expert.measured_s)
        for kind in ("for_theirs", "for_ours"):
            for key, value in row[kind].items():  # type: ignore[union-attr]
                print("   ", kind, key, _short(value), flush=True)
    write_result(Path("bench/results/plan_experts.json"), seconds="processor time of one thread", keep=KEEP, cases=rows)


if __name__ == "__main__":
    main()

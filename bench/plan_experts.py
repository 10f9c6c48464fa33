"""Plans that experts published, among ours: how many meshes ours puts before theirs, and the gain that it promises.

Of a published plan the degrees, and what else is told, are kept; what is not told is set as our search sets it best.
Both are priced by the closed form for Superstep's own kernels: a rank says how the planner would have ordered the two,
not that their software would have gained as much. A mesh counts by the best plan on it.

    python -m bench.plan_experts
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.machine import write_result
from superstep.cost.closed.decoder_size import array
from superstep.cost.closed.footprint import COMMUNICATOR_BYTES, CONTEXT_BYTES, USABLE
from superstep.hardware.text import cluster
from superstep.plan.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from superstep.planner.price import pricing_of
from superstep.planner.search import Found, Side, search
from superstep.planner.search_problem import Problem, Rule

KEEP = 60
"""Meshes that are known in order; a plan behind all of them is told as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """A published plan.

    Attributes:
        plan: the fields of ``[plan]`` that are told.
        model_name: as ``superstep plan`` has it.
        source: where it was published; or what it is, where it was not.
    """

    model_name: str
    chips: str
    batch: int
    sequence: int
    plan: Mapping[str, object] = field(default_factory=dict)
    source: str


EXPERTS: dict[str, Expert] = {
    "Llama 3 405B, 8k": Expert(
        model_name="llama3.1-405b",
        chips="16384xH100",
        batch=2048,
        sequence=8192,
        plan={"tp": 8, "cp": 1, "pp": 16, "dp": 128},
        source="Dubey 2024, table 4; nothing was computed again there, which our kernels have no memory for",
    ),
    "Llama 3 405B, 131k": Expert(
        model_name="llama3.1-405b",
        chips="16384xH100",
        batch=128,
        sequence=131072,
        plan={"tp": 8, "cp": 16, "pp": 16, "dp": 8},
        source="Dubey 2024, table 4",
    ),
    "DeepSeek-V3": Expert(
        model_name="deepseek-v3",
        chips="2048xH800",
        batch=15360,
        sequence=4096,
        plan={"pp": 16, "ep": 64, "tp": 1, "cp": 1, "zero": 1},
        source="DeepSeek-AI 2024, sec. 3.2",
    ),
    "Qwen3-235B": Expert(
        model_name="qwen3-235b-a22b",
        chips="256xH100",
        batch=2048,
        sequence=4096,
        plan={"tp": 2, "pp": 8, "ep": 32, "cp": 1, "microbatch": 1},
        source="Megatron Bridge 25.11, its recipe for 256 H100",
    ),
    "70B on 24 A100": Expert(
        model_name="llama3-70b",
        chips="24xA100",
        batch=192,
        sequence=4096,
        plan={"dp": 24, "tp": 1, "pp": 1, "cp": 1, "zero": 3, "recompute": "full"},
        source="usual practice: FSDP over all chips, everything computed again",
    ),
}


LATENT = {
    "name": "qwen3-30b-a3b", "layers": 61, "width": 7168, "heads": 128, "kv_heads": 128, "head_dim": 128, "ffn": 2048,
    "vocab": 129280, "experts": 256, "experts_per_token": 8, "shared_experts": 1,
}  # fmt: skip
"""DeepSeek-V3 but for what no shape of ours has: its latent attention and its first dense layers."""


def problem_of(expert: Expert) -> Problem:
    """What the expert planned for."""
    found = cluster(expert.chips)
    known: Mapping[str, Any] = LATENT if expert.model_name == "deepseek-v3" else {"name": expert.model_name}
    base = RunConfig(
        model=ModelConfig(**known),
        data=DataConfig(sequence_tokens=expert.sequence),
        train=TrainConfig(batch_sequences=expert.batch),
    )
    memory = USABLE * found.chip.memory_bytes - CONTEXT_BYTES - COMMUNICATOR_BYTES
    return Problem(base=base, cluster=found, compute="bf16", memory_bytes=memory)


def side_of(expert: Expert) -> Side:
    """Its prices; DeepSeek-V3's with all that a decoder has."""
    problem = problem_of(expert)
    pricing = pricing_of(problem)
    if expert.model_name != "deepseek-v3":
        return Side(problem=problem, pricing=pricing)
    latent = {"query_rank": 1536, "key_rank": 512, "dense_layers": 3, "ffn": 18432}
    whole = replace(pricing.model, **{name: array(value) for name, value in latent.items()})
    return Side(problem=problem, pricing=replace(pricing, model=whole))


def told(found: Found) -> dict[str, object]:
    """A plan as its fields."""
    return asdict(found.plan.plan_config(0, found.side.problem))


def ranked(expert: Expert) -> dict[str, object]:
    """Ours and theirs."""
    side = side_of(expert)
    rules = tuple(Rule(name, value) for name, value in expert.plan.items())
    theirs = replace(side, problem=replace(side.problem, rules=rules))
    kept = search([theirs], keep=1).best if len(theirs.space.cores()) else ()
    start = time.process_time()
    best = search([side], keep=KEEP).best
    seconds = time.process_time() - start
    if not kept:
        return {"source": expert.source, "plan": dict(expert.plan), "why": "does not fit, or is not in the space"}
    before = sum(each.step_s < kept[0].step_s * (1 - 1e-9) for each in best)
    return {
        "source": expert.source,
        "plan": dict(expert.plan),
        "meshes_before": before if before < len(best) else None,
        "gain": kept[0].step_s / best[0].step_s - 1,
        "step_s": kept[0].step_s,
        "best_step_s": best[0].step_s,
        "theirs": told(kept[0]),
        "ours": told(best[0]),
        "search_s": seconds,
    }


def main() -> None:
    """Rank, print and write."""
    argparse.ArgumentParser(prog="python -m bench.plan_experts", description=__doc__).parse_args()
    rows: dict[str, object] = {}
    for name, expert in EXPERTS.items():
        rows[name] = row = ranked(expert)
        print(name, {key: row[key] for key in row if key not in ("theirs", "ours", "plan", "source")})
        for key in ("theirs", "ours"):
            if key in row:
                print("   ", key, {k: v for k, v in row[key].items() if v not in (1, 0, None, False, "ring")})  # type: ignore[attr-defined]
    write_result(Path("bench/results/plan_experts.json"), seconds="processor time of one thread", keep=KEEP, cases=rows)


if __name__ == "__main__":
    main()

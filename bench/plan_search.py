"""How fast the planner searches: plans priced in a second on one core, and seconds until the best plan is known.

Figures of one thread. *Priced*: plans of the whole space, drawn at random from its cores, whose bytes and seconds are
computed, with nothing pruned. *Search*: until the best five meshes are known exactly, bounds and all. *Decided*: plans
of the space over these seconds. *Table*: all processor time of `superstep plan` until its first table is there, the
interpreter's start with it; for an error, until it is refused.

    python -m bench.plan_search [--seconds 5]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench.machine import write_result
from superstep.hardware.cluster_file import cluster
from superstep.plan.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from superstep.planner.price import pricing_of
from superstep.planner.search import PricedProblem, chunks_of, search
from superstep.planner.search_problem import SearchProblem

CASES = {
    "GPT-3 175B on 4,096 A100": ("gpt3-175b", "4096xA100", 1536, 2048),
    "1T on 16,384 A100": ("1t", "16384xA100", 3072, 2048),
    "Llama 405B on 131,072 H100": ("llama3.1-405b", "131072xH100", 16384, 8192),
    "Mixtral 8x7B on 1,024 H100": ("mixtral-8x7b", "1024xH100", 1024, 8192),
}
KEEP = 5
TABLES = {
    "Llama 70B on 512 H100": ("llama3-70b", "512xH100"),
    "Llama 405B on 16,384 H100": ("llama3.1-405b", "16384xH100"),
    "an error: 70B on 4 H100": ("llama3-70b", "4xH100"),
}
TIMED = """
import resource, sys
from superstep.errors import UserError
from superstep.planner.ranking.plan_request import PlanRequest, problems
from superstep.planner.ranking.rank_layouts import first_plans
request = PlanRequest(cluster=sys.argv[2])
try:
    first_plans(problems(sys.argv[1], request), request)
except UserError:
    pass
spent = resource.getrusage(resource.RUSAGE_SELF)
print(spent.ru_utime + spent.ru_stime)
"""


def sides_of(name: str, chips: str, batch: int, sequence: int) -> list[PricedProblem]:
    """The problem in both formats."""
    found = cluster(chips)
    base = RunConfig(
        model=ModelConfig(name=name),
        data=DataConfig(sequence_tokens=sequence),
        train=TrainConfig(batch_sequences=batch),
    )
    problems = [
        SearchProblem(base=base, cluster=found, compute=compute, memory_bytes=0.94 * found.chip.memory_bytes)
        for compute in ("bf16", "fp32")
    ]
    return [PricedProblem(problem=problem, pricing=pricing_of(problem)) for problem in problems]


def priced_per_s(side: PricedProblem, seconds: float) -> float:
    """Plans whose bytes and seconds are computed in a second of processor time, with the making of their columns."""
    space = side.space
    cores = space.cores()
    order = np.random.default_rng(0).permutation(len(cores))
    priced, start, at = 0, time.process_time(), 0
    while time.process_time() - start < seconds:
        core = cores.take(order[at % len(order)][None])
        at += 1
        for plans in chunks_of(space.with_shardings(space.with_schedules(core))):
            side.pricing.bytes(plans)
            side.pricing.seconds(plans)
            priced += len(plans)
    return priced / (time.process_time() - start)


def table_s(name: str, chips: str) -> float:
    """Processor time of an interpreter of its own, until the first table or the refusal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [sys.executable, "-c", TIMED, name, chips], check=True, capture_output=True, text=True, env=environment
    )
    return float(told.stdout)


def main() -> None:
    """Measure every case and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for which plans are priced, each case")
    options = parser.parse_args()
    rows = []
    print(f"{'':30}{'plans':>14}{'priced/s':>12}{'search':>10}{'priced':>10}{'decided/s':>14}")
    for name, case in CASES.items():
        sides = sides_of(*case)
        rate = priced_per_s(sides[0], options.seconds)
        start = time.process_time()
        answer = search(sides, keep=KEEP)
        took_s = time.process_time() - start
        row = {
            "case": name,
            "plans": answer.plans,
            "priced_per_s": rate,
            "search_s": took_s,
            "priced": answer.priced,
            "decided_per_s": answer.plans / took_s,
            "best_step_s": answer.best[0].step_s,
        }
        rows.append(row)
        figures = f"{answer.plans:>14,}{rate:>12,.0f}{took_s:>8.2f} s{answer.priced:>10,}"
        print(f"{name:30}{figures}{answer.plans / took_s:>14,.0f}")
    least = min(row["priced_per_s"] for row in rows)
    tables = {name: table_s(*case) for name, case in TABLES.items()}
    for name, seconds in tables.items():
        print(f"{name:30}{seconds:>8.2f} s until the table")
    write_result(
        Path("bench/results/plan_search.json"),
        seconds="processor time of one thread",
        keep=KEEP,
        cases=rows,
        table_s=tables,
    )
    print(f"at least {least:,.0f} plans a second and core; the longest search {max(r['search_s'] for r in rows):.2f} s")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""Dynamic tensor rematerialization: chains of units, and the eight traces of operations of its authors.

    python -m bench.rematerialize                                   chains in room for 2 · √units, beside LRU
    python -m bench.rematerialize --traces FOLDER --theirs FILE     traces at tenths of their memory

FOLDER is ``simrd/logs.zip`` of github.com/uwsampl/dtr-prototype, unpacked. FILE has a line of JSON for each run of
their simulator (``RuntimeV2EagerOptimized``, score ``DTR``): model, ratio, memory, state ("ok", "oom", "slow") and
overhead, the clock at the end over that without a budget. A budget is a share of ``memory``, the most that their
simulator holds without one; "slow" is an overhead above 2.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from bench.dtr import BudgetExceeded, rematerialize, score_dtr, score_lru
from bench.dtr_trace import Event, make_chain
from bench.machine import write_result
from bench.simrd_traces import read_trace

UNITS = (64, 128, 256, 512, 1024, 2048, 4096)
MOST_LRU = 1024
MOST_OVERHEAD = 2.0
RESULT = Path("bench/results/rematerialize.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--theirs", type=Path)
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args()
    figures = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else {}
    if args.traces is None:
        figures["chains"] = [measure_chain(units) for units in UNITS]
    else:
        figures["traces"] = compare(args.traces, args.theirs)
    write_result(args.json, **figures)


def measure_chain(units: int) -> dict[str, Any]:
    room, began_s = 2 * math.sqrt(units), time.perf_counter()
    forwards = count_forwards(units, room, score_dtr)
    row = {"units": units, "room": room, "forwards": forwards, "solver_s": time.perf_counter() - began_s}
    if units <= MOST_LRU:
        row["forwards_lru"] = count_forwards(units, room, score_lru)
    print(row, flush=True)
    return row


def count_forwards(units: int, room: float, score: Any) -> float:
    """Forward passes for each unit."""
    return sum(run < units for run in rematerialize(make_chain(units), room, score=score).runs) / units


def compare(folder: Path, theirs: Path) -> list[dict[str, Any]]:
    """Each trace at each budget of the authors' runs."""
    models = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["models"]
    runs = [json.loads(line) for line in theirs.read_text(encoding="utf-8").splitlines()]
    rows = []
    for model in models:
        trace = read_trace((folder / Path(model["log"]).name).read_text(encoding="utf-8").splitlines())
        for run in (run for run in runs if run["model"] == model["name"]):
            state, overhead = run_within(trace, int(run["memory"] * run["ratio"]))
            rows.append(
                {
                    "model": run["model"],
                    "ratio": run["ratio"],
                    "state": state,
                    "overhead": overhead,
                    "theirs": run["state"],
                    "overhead_of_theirs": run["overhead"] if run["state"] == "ok" else None,
                }
            )
            print(rows[-1], flush=True)
    return rows


def run_within(trace: tuple[Event, ...], budget_bytes: int) -> tuple[str, float | None]:
    try:
        return "ok", rematerialize(trace, budget_bytes, most_overhead=MOST_OVERHEAD).overhead
    except BudgetExceeded as refused:
        return ("slow" if "more than" in str(refused) else "oom"), None


if __name__ == "__main__":
    main()

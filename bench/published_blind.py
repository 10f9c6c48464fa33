"""Predictions of published runs, written before anybody has looked at an error.

    python -m bench.published_blind --runs FILE --model COMMIT --json OUT

The file has each row's predicted seconds, bytes and verdict, and the reason where a row cannot be predicted; what was
published stays out of it, and is not read. It is committed before a constant or a formula learns from these rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.published_memory import hold, leanest
from bench.published_rows import Row, read_rows
from bench.published_steps import Steps
from superstep.cost.closed.efficiency import FITTED

TOLD = ("step_time_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu_pct", "hfu_pct", "peak_mem_gb",
        "oom", "std_model_tflops_per_gpu", "std_mfu_pct")  # fmt: skip
"""What was measured: emptied before the model sees a row."""


def blind(rows: Sequence[Row]) -> list[dict[str, object]]:
    """One record for each row, in their order."""
    asked = [{**row, **dict.fromkeys(TOLD, "")} for row in rows]
    known = [row for row in asked if row["hidden"] and row["n_layers"]]
    steps = Steps(known)
    seconds = dict(zip((row["row_id"] for row in steps.rows), steps.seconds(FITTED), strict=True))
    held = hold([leanest(row) for row in steps.rows])
    memory = {
        row["row_id"]: (float(found), bool(fits))
        for row, found, fits in zip(held.rows, held.found.reserved, held.fits, strict=True)
    }
    why = {row["row_id"]: reason for row, reason in steps.left_out}
    return [_record(row, seconds, memory, why) for row in asked]


def _record(
    row: Row, seconds: Mapping[str, float], memory: Mapping[str, tuple[float, bool]], why: Mapping[str, str]
) -> dict[str, object]:
    name = row["row_id"]
    if name not in seconds:
        return {"row_id": name, "refused": why.get(name, "the model's dims are not stated")}
    held, fits = memory[name]
    return {"row_id": name, "predicted_s": float(seconds[name]), "reserved_bytes": round(held), "fits": fits}


def main(argv: Sequence[str] | None = None) -> None:
    """Predict and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.published_blind", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="a table with the columns of runs.csv")
    parser.add_argument("--model", required=True, help="the commit whose formulas and constants these are")
    parser.add_argument("--json", type=Path, required=True, help="where the predictions go")
    options = parser.parse_args(argv)
    records = blind(read_rows(options.runs))
    told = {"model": options.model, "table": options.runs.name, "rows": records}
    options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    refused = sum("refused" in record for record in records)
    print(f"{len(records)} rows: {len(records) - refused} predicted, {refused} refused")


if __name__ == "__main__":
    main()

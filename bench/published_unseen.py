"""Rows that nothing was learned from, as a stranger meets the planner: how far off it is, and what its ranges hold.

    python -m bench.published_unseen --json bench/results/published_unseen.json

Rows of a stack are off together, so that a share over rows is a share over few stacks: the file has each source's too.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.published_interval import is_inside, known
from bench.published_memory import labels_of, peaks_of
from bench.published_refused import kept
from bench.published_rows import DATA, Row, is_timed, number, read_rows
from bench.published_score import STEPS, Scored, is_judged, summary
from bench.published_steps import Steps
from superstep.cost.closed.efficiency import FITTED
from superstep.cost.closed.uncertainty import MEMORY, STEP


def score(rows: Sequence[Row]) -> dict[str, object]:
    """Errors of steps and peaks, the share inside the ranges that are printed, and that of layouts rightly judged."""
    rows, refused = kept(rows)
    steps = Steps([row for row in rows if is_timed(row) and row["kind"] in STEPS])
    published_s = np.array([number(row, "step_time_s") for row in steps.rows])
    scored = Scored(steps.rows, published_s, steps.seconds(FITTED))
    inside = is_inside(np.log(published_s / scored.predicted_s), known(steps.rows, steps.parts(FITTED)), STEP)
    peaks, labels = peaks_of(rows), labels_of(rows)
    factors = peaks.published / peaks.predicted
    sources = dict.fromkeys(row["source"] for row in steps.rows)
    return {
        "refused": len(refused) + len(steps.left_out),
        "steps": _errors(scored) | {"inside": float(inside.mean())},
        "steps of whole plans": _errors(scored.where(is_judged)),
        "steps by source": {
            name: _errors(scored.where(lambda row, name=name: row["source"] == name)) for name in sources
        },
        "peaks": {
            "rows": len(peaks.rows),
            "median": float(np.median(peaks.errors)),
            "inside": float(((factors >= MEMORY[0]) & (factors <= MEMORY[1])).mean()),
        },
        "fits": {"rows": len(labels.rows), "right": float((labels.published == labels.predicted).mean())},
    }


def _errors(scored: Scored) -> dict[str, float]:
    rows, median, p90 = summary(scored)
    return {"rows": rows, "median": median, "p90": p90}


def main(argv: Sequence[str] | None = None) -> None:
    """Score, print, write."""
    options = argparse.ArgumentParser(prog="python -m bench.published_unseen", description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=Path, default=DATA / "runs_3.csv", help="a table with the columns of runs.csv")
    options.add_argument("--json", type=Path, help="write the score here")
    asked = options.parse_args(argv)
    found = {"table": asked.runs.name, "date": datetime.date.today().isoformat()} | score(read_rows(asked.runs))
    print(json.dumps(found, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

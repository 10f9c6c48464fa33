"""How often finished runs of recipes/audio_language.toml tell the language of held-out prompts.

    superstep train recipes/audio_language.toml --plan.dp 1 --plan.zero 0
    python -m bench.language runs/audio_language

    python -m bench.language RUN ... --out bench/results/language.json      several runs, such as one for each seed

The accuracy is that of a run's last validation, as its events have it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.machine import write_result
from superstep.plan.config_io import read_config

WANTED = 0.9
"""The share of held-out prompts that the recipe is to tell."""


def judge(run: Path) -> dict[str, float]:
    """The last validation of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    *_, last = (line for line in lines if line["event"] == "evaluated")
    seed = read_config(run / "run.toml").train.seed
    return {"seed": seed, "steps": last["step"], "accuracy": round(last["accuracy"], 4), "loss": round(last["loss"], 4)}


def main(argv: Sequence[str]) -> int:
    """Read each run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args(argv)
    runs = [judge(run) for run in given.run]
    for run, verdict in zip(given.run, runs, strict=True):
        sys.stdout.write(f"{run}: {json.dumps(verdict)}\n")
    if given.out is not None:
        write_result(given.out, wanted=WANTED, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

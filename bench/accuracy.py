"""How often finished runs of a recipe classify held-out samples rightly, beside the same in plain PyTorch.

    superstep train recipes/audio_language.toml --plan.dp 1 --plan.zero 0
    python -m bench.accuracy runs/audio_language

    python -m bench.accuracy RUN ... --wanted 0.9 --out bench/results/language.json     several runs, such as one a seed
    python -m bench.accuracy RUN ... --plain 1 --wanted 0.55 --out bench/results/resnet.json

The accuracy is that of a run's last validation, as its events have it. With ``--plain`` the same model is trained in
plain PyTorch with the batches, rates and steps of the first runs: a chain of units that reads one field, on one rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.machine import write_result
from bench.plain_ddp import PlainDdp
from bench.sample_batches import read_batches, read_held_out
from superstep.launch.ranks import World, launch
from superstep.plan.config import RunConfig
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import Resolved
from superstep.train.lr_schedule import rate
from superstep.train.weights.model import resolve_config, units_of

EVERY = 50
"""Steps between lines of the plain training."""


def read_run(run: Path) -> RunConfig:
    """The config of a run."""
    return read_config(run / "run.toml")


def judge(run: Path) -> dict[str, float]:
    """The last validation of a run, and how many samples it trained a second."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train = read_run(run).train
    last = [line for line in lines if line["event"] == "evaluated"][-1]
    step_s = statistics.median(line["step_s"] for line in lines if line["event"] == "step")
    return {
        "seed": train.seed,
        "steps": last["step"],
        "accuracy": round(last["accuracy"], 4),
        "loss": round(last["loss"], 4),
        "samples_per_s": round(train.batch_sequences / step_s, 1),
    }


def train_plain(world: World, run: Resolved) -> dict[str, float]:
    """Train the model of a run in plain PyTorch on one rank, and judge it as the run was."""
    train = run.config.train
    side, batches = PlainDdp(run, units_of(run), world.size), read_batches(run, slice(0, train.batch_sequences))
    seconds: list[float] = []
    for step in range(train.steps):
        batch, begin_s = next(batches), time.perf_counter()
        loss = side.train(batch, rate(train, step))
        seconds.append(time.perf_counter() - begin_s)
        if (step + 1) % EVERY == 0:
            sys.stdout.write(f"plain: step {step + 1}, loss {loss:.4f}\n")
            sys.stdout.flush()
    held_out = read_held_out(run, slice(0, train.batch_sequences))
    right = sum(map(side.count_right, held_out)) / sum(batch.valid_tokens for batch in held_out)
    samples_per_s = round(train.batch_sequences / statistics.median(seconds), 1)
    return {"seed": train.seed, "steps": train.steps, "accuracy": round(right, 4), "samples_per_s": samples_per_s}


def on_one_rank(config: RunConfig) -> Resolved:
    """The config's run without a layout."""
    return resolve_config(replace(config, plan=replace(config.plan, dp=1, zero=0)))


def main(argv: Sequence[str]) -> int:
    """Read each run, train beside the first ones, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--plain", type=int, default=0, help="how many of them to train in plain PyTorch too")
    parser.add_argument("--wanted", type=float, help="the share of right answers that the recipe is to reach")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args(argv)
    runs = [judge(run) for run in given.run]
    for run, verdict in zip(given.run, runs, strict=True):
        sys.stdout.write(f"{run}: {json.dumps(verdict)}\n")
    plain = [launch(1, train_plain, on_one_rank(read_run(run))) for run in given.run[: given.plain]]
    for verdict in plain:
        sys.stdout.write(f"plain PyTorch: {json.dumps(verdict)}\n")
    if given.out is not None:
        beside = {"plain": plain} if plain else {}
        write_result(given.out, wanted=given.wanted, runs=runs, **beside)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

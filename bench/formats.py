"""The loss of number formats beside bf16: the demo, trained from the same weights on the same text.

    python -m bench.formats [--seeds 5] [--steps 600] [--formats fp16 fp16-unscaled]

Each seed trains every format in turn, on one rank. The figure is the mean of the validation losses after training,
over the loss in bf16, with the interval of 1.96 standard errors over the seeds' ratios. In ``fp16-unscaled`` the loss
scale is 1: what is lost without it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.machine import write_result
from superstep.comm.device import Device
from superstep.data.preparation.prepare import prepare
from superstep.launch.ranks import World
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.loss_scale import LossScaleConfig
from superstep.plan.resolution.resolve import resolve
from superstep.state.manifest import Position
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.loop import evaluate, steps
from superstep.train.run_folder.run_paths import RunFolder

BEFORE = "bf16"
FORMATS: dict[str, tuple[NumericsConfig, LossScaleConfig | None]] = {
    "bf16": (NumericsConfig(compute="bf16"), None),
    "fp16": (NumericsConfig(compute="fp16"), None),
    "fp16-unscaled": (NumericsConfig(compute="fp16"), LossScaleConfig(start=1.0, growth=1.0)),
}


def train_in(name: str, seed: int, count: int, corpus: Path) -> dict[str, float]:
    """Train the demo in a format: its validation loss, and what became of the loss scale."""
    numerics, loss_scale = FORMATS[name]
    run = resolve(
        RunConfig(
            model=ModelConfig(name="demo"),
            train=TrainConfig(steps=count, seed=seed, eval_batches=16),
            plan=PlanConfig(dp=1, microbatch=4),
            numerics=numerics,
            loss_scale=loss_scale,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = CorpusTrainer(World(0, 1, Device("cpu")), run, RunFolder(root=Path(folder)), corpus, None)
        position = trainer.start()
        for done in steps(trainer, position):
            position = done.position
        found = {"loss": evaluate(trainer, position).loss, **describe_scale(position)}
        trainer.close()
    return found


def describe_scale(position: Position) -> dict[str, float]:
    """The loss scale at the end, and the steps that were skipped."""
    scale = position.loss_scale
    return {} if scale is None else {"loss_scale": scale.factor, "skipped_steps": scale.skipped_steps}


def summarize(name: str, rows: Sequence[dict[str, dict[str, float]]]) -> dict[str, float | list[float]]:
    """A format's loss over that in bf16, as a mean over the seeds with its interval."""
    ratios = [row[name]["loss"] / row[BEFORE]["loss"] for row in rows]
    mean = statistics.fmean(ratios)
    half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    interval = [] if math.isnan(half) else [round(mean - half, 5), round(mean + half, 5)]
    return {"ratio": round(mean, 5), "interval": interval}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS], default=["fp16", "fp16-unscaled"])
    parser.add_argument("--out", type=Path, default=Path("bench/results/formats.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [BEFORE, *(name for name in options.formats if name != BEFORE)]
    rows: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare(DataConfig(), 2048, Path(folder)).folder
        for seed in range(options.seeds):
            rows.append({name: train_in(name, seed, options.steps, corpus) for name in names})
            print(json.dumps(rows[-1]), flush=True)
            figures = {name: summarize(name, rows) for name in names[1:]}
            write_result(options.out, steps=options.steps, formats=figures, seeds=rows)


if __name__ == "__main__":
    main()

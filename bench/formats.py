"""The loss of number formats beside bf16: the demo, trained from the same weights on the same text.

    python -m bench.formats [--seeds 5] [--steps 600] [--formats 8bit bf16-master]

Each seed trains every format in turn, on one rank. The figure is the mean of the validation losses after training,
over the loss in bf16, with the interval of 1.96 standard errors over the seeds' ratios. All compute in bf16 but fp16:

    fp16              and without a loss scale: fp16-unscaled
    8bit              both moments of AdamW
    bf16-moments      both moments, rounded stochastically
    bf16-master       the weights, rounded stochastically; to the nearest number: bf16-master-nearest
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.machine import write_result
from bench.trained_text import compare_losses, open_trainer, train_to_end
from superstep.data.preparation.prepare import prepare
from superstep.numerics.narrow import narrow_update
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.loss_scale import LossScaleConfig
from superstep.plan.resolution.resolve import resolve
from superstep.state.manifest import Position
from superstep.train.loop import evaluate

BEFORE, BF16 = "bf16", NumericsConfig(compute="bf16")


@dataclass(frozen=True, slots=True)
class Format:
    """The settings of a run.

    Attributes:
        train: of ``TrainConfig``.
        is_nearest: bf16 is rounded to the nearest number, in place of stochastically.
    """

    numerics: NumericsConfig = BF16
    loss_scale: LossScaleConfig | None = None
    train: Mapping[str, Any] = field(default_factory=dict)
    is_nearest: bool = False


FORMATS = {
    BEFORE: Format(),
    "fp16": Format(NumericsConfig(compute="fp16")),
    "fp16-unscaled": Format(NumericsConfig(compute="fp16"), LossScaleConfig(start=1.0, growth=1.0)),
    "8bit": Format(train={"moments": "8bit"}),
    "bf16-moments": Format(train={"moments": "bf16"}),
    "bf16-master": Format(NumericsConfig(compute="bf16", master="bf16")),
    "bf16-master-nearest": Format(NumericsConfig(compute="bf16", master="bf16"), is_nearest=True),
}


def train_in(name: str, seed: int, count: int, corpus: Path) -> dict[str, float]:
    """Train the demo in a format: its validation loss, and what became of the loss scale."""
    chosen = FORMATS[name]
    run = resolve(
        RunConfig(
            model=ModelConfig(name="demo"),
            train=TrainConfig(steps=count, seed=seed, eval_batches=16, **chosen.train),
            plan=PlanConfig(dp=1, microbatch=4),
            numerics=chosen.numerics,
            loss_scale=chosen.loss_scale,
        )
    )
    rounding = mock.patch.object(narrow_update, "round_stochastically", round_to_nearest)
    with rounding if chosen.is_nearest else nullcontext(), open_trainer(run, corpus) as trainer:
        position = train_to_end(trainer, trainer.start())
        return {"loss": evaluate(trainer, position).loss, **describe_scale(position)}


def round_to_nearest(numbers: Tensor, _: Tensor) -> Tensor:
    """fp32 to bf16."""
    return numbers.to(torch.bfloat16)


def describe_scale(position: Position) -> dict[str, float]:
    """The loss scale at the end, and the steps that were skipped."""
    scale = position.loss_scale
    return {} if scale is None else {"loss_scale": scale.factor, "skipped_steps": scale.skipped_steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS], default=[*FORMATS])
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
            figures = {name: compare_losses(rows, name, BEFORE) for name in names[1:]}
            write_result(options.out, steps=options.steps, formats=figures, seeds=rows)


if __name__ == "__main__":
    main()

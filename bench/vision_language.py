"""Questions on pictures whose pairs of kinds are in no picture of training or validation: what trained models answer.

    superstep train recipes/vision_language.toml --train.seed 0 --state.dir runs/seen0
    python -m bench.vision_language runs/seen0 ... --out bench/results/vision_language.json

Settings of the recipe were chosen on the pairs of the validation, so the judgement has pairs of its own. "blind" is the
share of right answers of the same model where every picture is grey, and "chance" that of the answer which is most
frequent for each sort of question. Intervals are 1.96 standard errors of a share.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from bench.gan import load
from bench.machine import write_result
from superstep.model.unit import UnitGraph
from superstep.plan.user_file import run_file

WANTED, ABOVE_CHANCE = 0.9, 0.05
"""What the recipe is to reach: the share of right answers, and the most above chance without pictures."""
ROWS = 64


def read_samples(recipe: ModuleType, count: int) -> dict[str, Tensor]:
    """Samples of the split "test", by field, [count, ...]."""
    read = [recipe.sample("test", number, np.random.default_rng([2, number])) for number in range(count)]
    return {name: torch.stack([one[name] for one in read]) for name in read[0]}


@torch.no_grad()
def answer(model: UnitGraph, samples: dict[str, Tensor]) -> Tensor:
    """The likeliest token at each place, [count, S]."""
    parts = zip(*(values.split(ROWS) for values in samples.values()), strict=True)
    answers = []
    for part in parts:
        fields = dict(zip(samples, part, strict=True))
        fields["pixels.sample"] = torch.zeros(fields["pixels"].shape[:2], dtype=torch.long)
        answers.append(model(fields).argmax(-1))
    return torch.cat(answers)


def share(right: Tensor) -> dict[str, object]:
    """The share of right answers, and 1.96 standard errors around it."""
    mean = float(right.float().mean())
    error = 1.96 * math.sqrt(mean * (1 - mean) / right.numel())
    return {"right": round(mean, 4), "interval": [round(mean - error, 4), round(mean + error, 4)]}


def judge(model: UnitGraph, recipe: ModuleType, samples: dict[str, Tensor]) -> dict[str, object]:
    """The shares of right answers: of all questions, of each sort, without pictures, and by chance."""
    is_asked, targets = samples["target"] >= 0, samples["target"]
    sorts = torch.arange(len(targets)) % len(recipe.QUESTIONS)
    right = (answer(model, samples) == targets)[is_asked].view(len(targets), -1)
    grey = samples | {"pixels": torch.zeros_like(samples["pixels"])}
    blind = (answer(model, grey) == targets)[is_asked]
    most = [targets[sorts == sort][is_asked[sorts == sort]] for sort in range(len(recipe.QUESTIONS))]
    chance = sum(int(each.bincount().max()) for each in most) / int(is_asked.sum())
    each = {name: share(right[sorts == sort]) for sort, name in enumerate(recipe.QUESTIONS)}
    return share(right) | each | {"blind": share(blind), "chance": round(chance, 4)}


def main(argv: Sequence[str]) -> int:
    """Judge each run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs of recipes/vision_language.toml")
    parser.add_argument("--samples", type=int, default=1500, help="pictures, each with three questions")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args(argv)
    recipe = run_file(Path("recipes/vision_language.py"), "vision_language")
    samples = read_samples(recipe, given.samples)
    runs = [judge(load(run), recipe, samples) for run in given.runs]
    for run, verdict in zip(given.runs, runs, strict=True):
        sys.stdout.write(f"{run}: {json.dumps(verdict)}\n")
    if given.out is not None:
        wanted = {"right": WANTED, "blind above chance": ABOVE_CHANCE}
        write_result(given.out, wanted=wanted, samples=given.samples, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

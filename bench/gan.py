"""What a trained GAN draws, as a trained LeNet-5 sees it: how many digits it recognises, and how often each.

    superstep train recipes/lenet.toml
    superstep train recipes/gan.toml
    python bench/gan.py runs/gan runs/lenet

A drawn digit counts as recognised where the classifier gives a class a probability of 0.9 or more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from superstep.model.custom.user_model import load_units
from superstep.model.files.hf import open_weights
from superstep.model.unit import UnitGraph
from superstep.plan.config_io import read_config
from superstep.train.weights.weights_folder import weights_of

SAMPLES, LATENTS, SURE = 1000, 64, 0.9
GENERATOR_UNITS = 2


def load(run: Path) -> UnitGraph:
    """The whole model of a run on one device, with the weights of its newest checkpoint."""
    model = UnitGraph(load_units(read_config(run / "run.toml")), seed=0)
    weights = open_weights(weights_of(run))
    with torch.no_grad():
        for name, (_, param) in model.parts.items():
            param.copy_(weights[name][:])
    return model


@torch.no_grad()
def judge(gan: UnitGraph, lenet: UnitGraph) -> dict[str, float | list[float]]:
    """The share of drawn digits that are recognised, and of each class in all."""
    draw = nn.Sequential(*gan.units[:GENERATOR_UNITS])
    latents = torch.randn(SAMPLES, LATENTS, generator=torch.Generator().manual_seed(0))
    probabilities: Tensor = lenet(draw(latents)).softmax(-1)
    best = probabilities.max(-1)
    counts = torch.bincount(best.indices, minlength=10)
    return {
        "recognised": float((best.values >= SURE).float().mean()),
        "shares": [round(float(count) / SAMPLES, 3) for count in counts],
    }


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python bench/gan.py GAN LENET")
    sys.stdout.write(json.dumps(judge(*(load(Path(run)) for run in sys.argv[1:]))) + "\n")

"""What trained GANs draw, as a trained LeNet-5 sees it: how many digits it recognises, and how often each.

    superstep train recipes/lenet.toml
    superstep train recipes/gan.toml
    python -m bench.gan runs/gan runs/lenet

    python -m bench.gan GAN ... LENET --out bench/results/gan.json      several runs, such as one for each seed

A drawn digit counts as recognised where the classifier gives a class a probability of 0.9 or more. Each run draws
1,000, 100 of each class that the generator is given; "asked" is the share that is recognised as that class.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bench.machine import write_result
from superstep.model.custom.user_model import load_units
from superstep.model.files.hf import open_weights
from superstep.model.unit import UnitGraph
from superstep.plan.config_io import read_config
from superstep.train.weights.weights_folder import weights_of

SAMPLES, LATENTS, CLASSES, SURE = 1000, 64, 10, 0.9
GENERATOR_UNITS = 2
RECOGNISED, SHARE = 0.9, (0.05, 0.15)
"""What the recipe is to reach: the share that is recognised, and the share of each digit."""


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
    """The shares of drawn digits that are recognised, and as the class that was given; those of classes."""
    draw = nn.Sequential(*gan.units[:GENERATOR_UNITS])
    latents = torch.randn(SAMPLES, LATENTS, generator=torch.Generator().manual_seed(0))
    given = torch.arange(SAMPLES) % CLASSES
    best = lenet(draw(torch.cat((latents, F.one_hot(given, CLASSES).float()), 1))).softmax(-1).max(-1)
    is_sure, counts = best.values >= SURE, torch.bincount(best.indices, minlength=CLASSES)
    return {
        "recognised": float(is_sure.float().mean()),
        "asked": float((is_sure & (best.indices == given)).float().mean()),
        "shares": [round(float(count) / SAMPLES, 3) for count in counts],
    }


def main(argv: Sequence[str]) -> int:
    """Judge each run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gan", nargs="+", type=Path, help="folders of runs of recipes/gan.toml")
    parser.add_argument("lenet", type=Path, help="the folder of a run of recipes/lenet.toml")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args(argv)
    lenet = load(given.lenet)
    runs = [{"checkpoint": weights_of(run).name} | judge(load(run), lenet) for run in given.gan]
    for run, verdict in zip(given.gan, runs, strict=True):
        sys.stdout.write(f"{run}: {json.dumps(verdict)}\n")
    if given.out is not None:
        write_result(given.out, wanted={"recognised": RECOGNISED, "share": list(SHARE)}, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

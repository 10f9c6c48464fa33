"""A generative adversarial network (Goodfellow 2014) on the digits of recipes/fetch_digits.py, in runs/digits.

A step has two phases. In "judge" the discriminator learns to tell real digits from drawn ones; in "fool" the generator
learns to draw digits that the discriminator takes for real (the loss of section 3 that does not saturate). Convolutions
as in DCGAN (Radford 2016), without batch norm. The latents are a field of the samples, drawn from their noise: a
function of the seed, the epoch and the digit, whatever the layout.
"""

import functools
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.data.samples.idx import read_idx
from superstep.model.custom.units_from_modules import as_units
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig

FOLDER = Path("runs/digits")
FILES = {"train": "train", "validation": "t10k"}
INPUT, LATENTS = "latents", 64
"""The field that the first unit reads, and its numbers."""


@functools.cache
def digits(split: str) -> tuple[Tensor, Tensor]:
    """Pixels [N, 1, 28, 28], ink from 0 to 1, and classes [N]."""
    name = FOLDER / FILES[split]
    pixels, classes = read_idx(f"{name}-images-idx3-ubyte"), read_idx(f"{name}-labels-idx1-ubyte")
    return pixels.unsqueeze(1).float() / 255, classes.long()


def length(split: str) -> int:
    """The number of digits in a split. Superstep calls this."""
    return len(digits(split)[1])


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """One digit: pixels [1, 28, 28], its class, which no loss reads, and latents [64]. Superstep calls this."""
    pixels, classes = digits(split)
    latents = torch.from_numpy(noise.standard_normal(LATENTS).astype(np.float32))
    return {"latents": latents, "pixels": pixels[index], "target": classes[index]}


class Pair(nn.Module):
    """A drawn digit and a real one: [B, 2, 1, 28, 28]."""

    def forward(self, drawn: Tensor, real: Tensor) -> Tensor:
        return torch.stack((drawn, real), 1)


class Each(nn.Sequential):
    """Layers that compute each picture of a pair alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def judge(logits: Tensor, targets: Tensor) -> Tensor:
    """The discriminator's loss, of logits [B, 2] for a drawn and a real digit."""
    return (F.softplus(logits[:, 0]) + F.softplus(-logits[:, 1])).sum()


def fool(logits: Tensor, targets: Tensor) -> Tensor:
    """The generator's loss, of the same logits."""
    return F.softplus(-logits[:, 0]).sum()


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """Two units that draw, the pair, two units that judge. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    return as_units(
        [
            nn.Sequential(nn.Linear(LATENTS, 64 * 49), nn.GELU(), nn.Unflatten(1, (64, 7, 7))),
            nn.Sequential(
                nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Sigmoid()
            ),
            Pair(),
            Each(nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2)),
            nn.Sequential(Each(nn.Flatten(), nn.Linear(64 * 49, 1)), nn.Flatten()),
        ],
        inputs={2: [1, "pixels"]},
        loss={"judge": judge, "fool": fool},
        phases={"judge": (3, 4), "fool": (0, 1)},
    )

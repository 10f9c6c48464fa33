"""ResNet-18 (He 2016) with batch norm, and the emoji that it names: it learns from two makers' pictures, and is judged
by a third maker's.

`python recipes/fetch_emoji.py` writes the pictures. Training pictures are turned, scaled, moved and coloured at random
on a random background, by noise that is a function of the seed, the epoch and the picture. Batch norm is over groups of
64 samples of the global batch, so every layout computes the same.
"""

import functools
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.data.samples.idx import read_idx
from superstep.model.by_place.batch_norm import BatchNorm
from superstep.model.custom.units_from_modules import as_units
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig

FOLDER = Path("runs/emoji")
MAKERS = {"train": ("google", "twitter"), "validation": ("facebook",)}
GROUP = 64
"""Samples that are normalised together."""
WIDTHS = (64, 128, 256, 512)
"""Channels of each stage of two blocks."""


@functools.cache
def pictures(split: str) -> Tensor:
    """Pictures with transparency, uint8 [makers, emoji, 4, 64, 64]."""
    return torch.stack([read_idx(FOLDER / f"{maker}.idx") for maker in MAKERS[split]])


def length(split: str) -> int:
    """The number of pictures in a split. Superstep calls this."""
    return pictures(split).shape[0] * pictures(split).shape[1]


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """One picture: pixels [3, 64, 64] from -1 to 1, and the emoji's number. Superstep calls this."""
    maker, emoji = divmod(index, pictures(split).shape[1])
    rgba = pictures(split)[maker, emoji].float() / 255
    ground = torch.ones(3)
    if split == "train":
        rgba, ground = distort(rgba, noise), torch.from_numpy(noise.uniform(0.5, 1, 3)).float()
    pixels = rgba[:3] * rgba[3:] + ground.view(3, 1, 1) * (1 - rgba[3:])
    return {"pixels": pixels * 2 - 1, "target": torch.tensor(emoji)}


def distort(rgba: Tensor, noise: np.random.Generator) -> Tensor:
    """A picture turned by up to 15 degrees, scaled by up to 20%, moved by up to 6 pixels, with other colours."""
    angle, wide, high, right, down = noise.uniform(-1, 1, 5)
    turn, wide, high = angle * math.pi / 12, 1 + wide / 5, 1 + high / 5
    first = [wide * math.cos(turn), -high * math.sin(turn), right * 0.2]
    second = [wide * math.sin(turn), high * math.cos(turn), down * 0.2]
    grid = F.affine_grid(torch.tensor([[first, second]], dtype=torch.float32), [1, 4, 64, 64], align_corners=False)
    moved = F.grid_sample(rgba[None], grid, align_corners=False)[0]
    mix = torch.eye(3) + 0.15 * torch.from_numpy(noise.standard_normal((3, 3))).float()
    contrast, light = 1 + 0.3 * noise.uniform(-1, 1), 0.15 * noise.uniform(-1, 1)
    colours = torch.einsum("ij,jhw->ihw", mix, moved[:3] - 0.5) * contrast + 0.5 + light
    return torch.cat([colours.clamp(0, 1), moved[3:]])


def convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    """A convolution without a bias, since batch norm follows it."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class Block(nn.Module):
    """Two convolutions beside a path that is the identity where the shape allows it (figure 2 of the paper)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm_1 = convolution(inputs, outputs, 3, stride), BatchNorm(outputs, GROUP)
        self.second, self.norm_2 = convolution(outputs, outputs, 3, 1), BatchNorm(outputs, GROUP)
        self.beside = nn.Identity()
        if (inputs, stride) != (outputs, 1):
            self.beside = nn.Sequential(convolution(inputs, outputs, 1, stride), BatchNorm(outputs, GROUP))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm_2(self.second(F.relu(self.norm_1(self.first(x)))))
        return F.relu(inner + self.beside(x))


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """Ten units: the first convolution, eight blocks, and the classes. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    stem = nn.Sequential(
        convolution(3, WIDTHS[0], 7, 2), BatchNorm(WIDTHS[0], GROUP), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
    )
    blocks = [
        Block(WIDTHS[max(0, stage - 1)] if first else width, width, 2 if first and stage else 1)
        for stage, width in enumerate(WIDTHS)
        for first in (True, False)
    ]
    classes = pictures("train").shape[1]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], classes))
    return as_units([stem, *blocks, head])

"""ResNet (He 2016) with batch norm, and the emoji that it names, learnt from two makers' pictures, judged by a third's.

`python recipes/fetch_emoji.py` writes the pictures. In training the first unit blends two makers' pictures, and turns,
scales, moves and colours them on a random background, by noise of a place: the same on every layout.
`model.layers` is the depth in table 1 of the paper; from 50 on pictures are scaled to 224 pixels, the paper's size.
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
from superstep.numerics.loss import SmoothedCrossEntropy
from superstep.numerics.noise import Noise
from superstep.plan.config import RunConfig

FOLDER = Path("runs/emoji")
MAKERS = {"train": ("google", "twitter"), "validation": ("facebook",)}
GROUP = 128  # samples that are normalised together
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of each stage, by the depth; bottlenecks from 50 on."""


@functools.cache
def pictures(split: str) -> Tensor:
    """Pictures with transparency, uint8 [makers, emoji, 4, 64, 64]."""
    return torch.stack([read_idx(FOLDER / f"{maker}.idx") for maker in MAKERS[split]])


def length(split: str) -> int:
    """The number of pictures in a split. Superstep calls this."""
    return pictures(split).shape[0] * pictures(split).shape[1]


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """A picture and another maker's of the same emoji: pixels [2, 4, 64, 64], and its number. Superstep calls this."""
    makers = pictures(split)
    maker, emoji = divmod(index, makers.shape[1])
    return {"pixels": torch.stack((makers[maker, emoji], makers[maker - 1, emoji])), "target": torch.tensor(emoji)}


class Distort(nn.Module):
    """Pairs of pictures [B, 2, 4, 64, 64] to pixels from -1 to 1, [B, 3, size, size], in training distorted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, pairs: Tensor, noise: Noise) -> Tensor:
        rgba = pairs.float() / 255
        first, second = torch.cat((rgba[:, :, :3] * rgba[:, :, 3:], rgba[:, :, 3:]), 2).unbind(1)
        if not noise.place.is_training:
            x = F.interpolate(first, (self.size, self.size), mode="bilinear")  # of the same size: itself
            return (x[:, :3] + 1 - x[:, 3:]) * 2 - 1
        draws = noise.uniform("places", first.new_empty(len(first), 11))
        share, angle, wide, high, right, down, contrast, light, *ground = draws.split(1, 1)
        x = first + (2 * share.view(-1, 1, 1, 1) - 1).clamp(0) * (second - first)  # half of them are blends
        turn, wide, high = (2 * angle - 1) * math.radians(15), 0.8 + 0.4 * wide, 0.8 + 0.4 * high
        rows = (wide * turn.cos(), -high * turn.sin(), 0.4 * right - 0.2)
        rows += (wide * turn.sin(), high * turn.cos(), 0.4 * down - 0.2)
        grid = F.affine_grid(torch.cat(rows, 1).view(-1, 2, 3), [len(x), 4, self.size, self.size], align_corners=False)
        rgb, opacity = F.grid_sample(x, grid, align_corners=False).split((3, 1), 1)
        mix = torch.eye(3, device=x.device) + 0.15 * noise.normal("colours", first.new_empty(len(first), 3, 3))
        contrast, light = (0.7 + 0.6 * contrast).view(-1, 1, 1, 1), (0.35 + 0.3 * light).view(-1, 1, 1, 1)
        colours = (mix @ (rgb - 0.5 * opacity).flatten(2)).view_as(rgb) * contrast + light * opacity
        ground = 0.5 + torch.stack(ground, 1)[..., None] / 2
        return (torch.minimum(colours.clamp(0), opacity) + ground * (1 - opacity)) * 2 - 1


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution without a bias, and batch norm."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, BatchNorm(outputs, GROUP))


class Stem(nn.Sequential):
    """The distortion, and the layers before the first block."""

    def forward(self, pairs: Tensor, noise: Noise) -> Tensor:
        distort, first, *others = self
        return nn.Sequential(first, *others)(distort(pairs, noise).to(first[0].weight.dtype))


class Block(nn.Module):
    """Convolutions beside a path that is the identity where the shape allows it (figures 2 and 5 of the paper)."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        each = [convolution(inputs, width, 3, stride), nn.ReLU(), convolution(width, width, 3)]
        if outputs != width:
            each[:1] = convolution(inputs, width, 1), nn.ReLU(), convolution(width, width, 3, stride)
            each[-1] = convolution(width, outputs, 1)
        self.inner, self.beside = nn.Sequential(*each), nn.Identity()
        if (inputs, stride) != (outputs, 1):
            self.beside = convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.beside(x))


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """The first convolution, the blocks, and the classes. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    depth, width, blocks = config.model.layers or 18, 64, []
    factor, size = (1, 64) if depth < 50 else (4, 224)
    stem = Stem(Distort(size), convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    for stage, count in enumerate(BLOCKS[depth]):
        strides = [min(2, stage + 1)] + [1] * (count - 1)
        blocks += [Block(width, 64 << stage, width := factor * 64 << stage, stride) for stride in strides]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, pictures("train").shape[1]))
    return as_units([stem, *blocks, head], takes={0: ("noise",)}, loss=SmoothedCrossEntropy(0.1))

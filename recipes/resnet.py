"""ResNet (He 2016) with batch norm, and the emoji that it names, learnt from two makers' pictures, judged by a third's.

`python recipes/fetch_emoji.py` writes the pictures. The first unit cuts each to what is drawn, as makers leave other
margins; in training it turns, scales, moves and colours by noise of a place. The last of four channels is opacity.
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
# Blocks of each stage, by the depth; bottlenecks from 50 on.
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


@functools.cache
def pictures(split: str) -> Tensor:
    """Pictures with transparency, uint8 [makers, emoji, 4, 64, 64]."""
    return torch.stack([read_idx(FOLDER / f"{maker}.idx") for maker in MAKERS[split]])


def length(split: str) -> int:
    """The number of pictures in a split. Superstep calls this."""
    return pictures(split)[:, :, 0, 0, 0].numel()


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """One picture: pixels [4, 64, 64], and its number. Superstep calls this."""
    maker, emoji = divmod(index, pictures(split).shape[1])
    return {"pixels": pictures(split)[maker, emoji], "target": torch.tensor(emoji)}


def frame(is_drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Of what is drawn, [B, N, N], the middle [B, 2] on axes from -1 to 1, and the share of the longer side [B, 1]."""
    lines = torch.stack((is_drawn.any(1), is_drawn.any(2)), 1).float()
    first, after = lines.argmax(2), lines.shape[2] - lines.flip(2).argmax(2)
    return (first + after) / lines.shape[2] - 1, ((after - first) / lines.shape[2]).amax(1, keepdim=True)


def distort(pixels: Tensor, noise: Noise, size: int) -> Tensor:
    """Pictures [B, 4, 64, 64] to colours times opacity, and opacity, from -1 to 1, [B, 4, size, size]."""
    rgb, opacity = (pixels.float() / 255).split((3, 1), 1)
    x = torch.cat((rgb * opacity, opacity), 1)
    draws, mix = x.new_full((len(x), 7), 0.5), torch.eye(3, device=x.device)
    if noise.place.is_training:
        draws, colours = noise.uniform("places", draws), noise.normal("colours", x.new_empty(len(x), 3, 3))
        mix = mix + 0.15 * colours
    turn, scales, moves, contrast, light = (2 * draws - 1).split((1, 2, 2, 1, 1), 1)
    middle, side = frame(x[:, 3] > 0.1)
    turn = math.radians(8) * turn
    turned = torch.cat((turn.cos(), -turn.sin(), turn.sin(), turn.cos()), 1).view(-1, 2, 2)
    columns = turned * (side * (1 + 0.1 * scales))[:, None], (middle + 0.1 * side * moves)[..., None]
    grid = F.affine_grid(torch.cat(columns, 2), [len(x), 4, size, size], align_corners=False)
    rgb, opacity = F.grid_sample(x, grid, align_corners=False).split((3, 1), 1)
    contrast, light = (1 + 0.3 * contrast).view(-1, 1, 1, 1), (0.5 + 0.15 * light).view(-1, 1, 1, 1)
    colours = (mix @ (rgb - 0.5 * opacity).flatten(2)).view_as(rgb) * contrast + light * opacity
    return torch.cat((torch.minimum(colours.clamp(0), opacity), opacity), 1) * 2 - 1


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution without a bias, and batch norm."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, BatchNorm(outputs, GROUP))


class Stem(nn.Sequential):
    """The distortion, and the layers before the first block."""

    size = 64

    def forward(self, pixels: Tensor, noise: Noise) -> Tensor:
        return super().forward(distort(pixels, noise, self.size).to(self[0][0].weight.dtype))


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
    stem = Stem(convolution(4, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    factor, stem.size = (1, 64) if depth < 50 else (4, 224)
    for stage, count in enumerate(BLOCKS[depth]):
        strides = [min(2, stage + 1)] + [1] * (count - 1)
        blocks += [Block(width, 64 << stage, width := factor * 64 << stage, stride) for stride in strides]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, pictures("train").shape[1]))
    return as_units([stem, *blocks, head], takes={0: ("noise",)}, loss=SmoothedCrossEntropy(0.1))

"""LeNet-5 (LeCun 1998, section II.B), and the digits that it reads: idx files in runs/digits.

`python recipes/fetch_digits.py` writes them; MNIST's own files have the same names. Training pictures are turned,
scaled, moved and bent at random (section III.C; elastic distortions: Simard 2003), by noise that is a function of the
seed, the epoch and the picture. In place of the paper's distances to drawn characters the last layer gives logits.
"""

import functools
import math
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
BEND, SMOOTH = 6.0, 4.0
"""Elastic distortion: the size of the displacements, and the deviation of the Gaussian that smooths them, in pixels."""

# Table I of the paper: the maps of S2 that each map of C3 reads.
TABLE = ["012", "123", "234", "345", "045", "015", "0123", "1234", "2345", "0345", "0145", "0125", "0134", "1245",
         "0235", "012345"]  # fmt: skip


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
    """One digit: pixels [1, 28, 28] and its class. Superstep calls this."""
    pixels, classes = digits(split)
    return {"pixels": distort(pixels[index], noise) if split == "train" else pixels[index], "target": classes[index]}


@functools.cache
def gaussian(size: int) -> Tensor:
    """The matrix [size, size] that smooths a column when it is multiplied from the left."""
    place = torch.arange(size, dtype=torch.float32)
    weights = torch.exp(-((place - place[:, None]) ** 2) / (2 * SMOOTH**2))
    return weights / weights.sum(1, keepdim=True)


def distort(pixels: Tensor, noise: np.random.Generator) -> Tensor:
    """A picture turned by up to 10 degrees, scaled by up to 10%, moved by up to 2 pixels, and bent."""
    size = pixels.shape[-1]
    angle, wide, high, right, down = noise.uniform(-1, 1, 5)
    turn, wide, high = angle * math.pi / 18, 1 + wide / 10, 1 + high / 10
    first = [wide * math.cos(turn), -high * math.sin(turn), 4 * right / size]
    second = [wide * math.sin(turn), high * math.cos(turn), 4 * down / size]
    affine = torch.tensor([first, second], dtype=torch.float32)
    smooth = gaussian(size)
    field = smooth @ torch.from_numpy(noise.uniform(-1, 1, (2, size, size)).astype(np.float32)) @ smooth.t()
    grid = F.affine_grid(affine[None], [1, 1, size, size], align_corners=False)
    grid = grid + field.permute(1, 2, 0)[None] * (BEND * SMOOTH * 2 / size)
    return F.grid_sample(pixels[None], grid, align_corners=False)[0]


class Squash(nn.Module):
    """The paper's activation, appendix A."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.7159 * torch.tanh(x * (2 / 3))


class Subsample(nn.Module):
    """The mean of four pixels, times a weight of its map, plus a bias."""

    def __init__(self, maps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(maps, 1, 1))
        self.bias = nn.Parameter(torch.zeros(maps, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2) * self.weight + self.bias


class Chosen(nn.Conv2d):
    """A convolution in which each output map reads some input maps only, as ``TABLE`` says."""

    def __init__(self) -> None:
        super().__init__(6, 16, 5)
        reads = [[float(str(number) in row) for number in range(6)] for row in TABLE]
        self.register_buffer("reads", torch.tensor(reads)[..., None, None])

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.reads, self.bias)


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """Three units: C1 and S2, C3 and S4, and the rest. A pipeline stage holds one or more. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    return as_units(
        [
            nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), Squash(), Subsample(6), Squash()),
            nn.Sequential(Chosen(), Squash(), Subsample(16), Squash()),
            nn.Sequential(
                nn.Conv2d(16, 120, 5), Squash(), nn.Flatten(), nn.Linear(120, 84), Squash(), nn.Linear(84, 10)
            ),
        ]
    )

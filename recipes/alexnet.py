"""AlexNet (Krizhevsky 2012) on the emoji of recipes/fetch_emoji.py, in runs/emoji.

The paper's two columns, each on a GPU of its own, are plan.tp = 2: convolutions in groups are cut by their groups, so
that the columns meet in the third convolution and in the dense layers alone. Responses are normalised within a column.
Training pictures are a random part of 227 of 256 pixels, and half of them are mirrored (section 4.1), by noise of a
place. `model.width` is the number of maps of the first convolution, 96 in the paper; the other layers follow it.
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
from superstep.numerics.noise import Noise
from superstep.plan.config import RunConfig

FOLDER = Path("runs/emoji")
MAKERS = {"train": ("google", "twitter"), "validation": ("facebook",)}
COLUMNS, WHOLE, PART = 2, 256, 227


@functools.cache
def pictures(split: str) -> Tensor:
    """Pictures with transparency, uint8 [makers, emoji, 4, 64, 64]."""
    return torch.stack([read_idx(FOLDER / f"{maker}.idx") for maker in MAKERS[split]])


def length(split: str) -> int:
    """The number of pictures in a split. Superstep calls this."""
    return pictures(split).shape[0] * pictures(split).shape[1]


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """One picture: pixels [4, 64, 64], and the emoji's number. Superstep calls this."""
    maker, emoji = divmod(index, pictures(split).shape[1])
    return {"pixels": pictures(split)[maker, emoji], "target": torch.tensor(emoji)}


class Crop(nn.Module):
    """A part of a picture on white, from -1 to 1: [B, 3, 227, 227]; in training anywhere in it, else its middle."""

    def forward(self, pixels: Tensor, noise: Noise) -> Tensor:
        rgba = pixels.float() / 255
        x = (rgba[:, :3] + 1) * rgba[:, 3:] - 2 * rgba[:, 3:] + 1
        places = torch.full((len(x), 3), 0.5, device=x.device)
        if noise.place.is_training:
            places = noise.uniform("places", places)
        right, down, mirror = ((2 * places - 1) * (1 - PART / WHOLE)).unbind(1)
        side, none = torch.where(mirror > 0, -PART / WHOLE, PART / WHOLE), torch.zeros_like(right)
        rows = side, none, right, none, side.abs(), down
        grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), [len(x), 3, PART, PART], align_corners=False)
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False) * 2 - 1


class NormaliseResponses(nn.Module):
    """Section 3.3: each number over those of five neighbouring maps of its column."""

    def __init__(self, maps: int) -> None:
        super().__init__()
        self.maps = maps // COLUMNS

    def forward(self, x: Tensor) -> Tensor:
        columns = x.unflatten(1, (-1, self.maps)).flatten(0, 1)
        return F.local_response_norm(columns, 5, alpha=5e-4, beta=0.75, k=2.0).view_as(x)  # torch divides alpha by 5


class Features(nn.Sequential):
    """The picture's part, five convolutions, and the first dense layer."""

    def forward(self, pixels: Tensor, noise: Noise) -> Tensor:
        crop, first, *others = self
        return nn.Sequential(first, *others)(crop(pixels, noise).to(first.weight.dtype))


def start(layer: nn.Conv2d | nn.Linear, bias: float) -> nn.Conv2d | nn.Linear:
    """Section 5: normal weights of deviation 0.01, biases of 0 or 1."""
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.constant_(layer.bias, bias)
    return layer


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """Two units, which end where the columns meet. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    width = config.model.width or 96
    second, third, last, dense = width * 8 // 3, width * 4, width * 8 // 3, width * 128 // 3
    pool = functools.partial(nn.MaxPool2d, 3, 2)  # section 3.4: pools overlap
    features = [Crop(), start(nn.Conv2d(3, width, 11, 4), 0), nn.ReLU(), NormaliseResponses(width), pool()]
    features += [start(nn.Conv2d(width, second, 5, padding=2, groups=COLUMNS), 1), nn.ReLU()]
    features += [NormaliseResponses(second), pool()]
    features += [start(nn.Conv2d(second, third, 3, padding=1), 0), nn.ReLU()]
    features += [start(nn.Conv2d(third, third, 3, padding=1, groups=COLUMNS), 1), nn.ReLU()]
    features += [start(nn.Conv2d(third, last, 3, padding=1, groups=COLUMNS), 1), nn.ReLU(), pool()]
    features += [nn.Flatten(), start(nn.Linear(last * 36, dense), 1), nn.ReLU()]
    head = [nn.Dropout(0.5), start(nn.Linear(dense, dense), 1), nn.ReLU(), nn.Dropout(0.5)]
    head += [start(nn.Linear(dense, pictures("train").shape[1]), 0)]
    into = [f"0.{n}" for n, layer in enumerate(features) if isinstance(layer, nn.Conv2d)] + ["1.1"]
    axes = {f"{name}.{leaf}": ("columns",) for name in into for leaf in ("weight", "bias")}
    axes |= dict.fromkeys((f"0.{len(features) - 2}.weight", "1.4.weight"), (None, "columns"))
    return as_units([Features(*features), nn.Sequential(*head)], takes={0: ("noise",)}, axes=axes)

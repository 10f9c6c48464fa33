"""A generative adversarial network (Goodfellow 2014) that draws digits of a given class (AC-GAN, Odena 2017).

A step has two phases. In "judge" the discriminator learns to tell real digits from drawn ones, and the class of real
ones; in "fool" the generator learns to draw digits that it takes for real (the loss of section 3 that does not
saturate), and for the class that was given. Convolutions and batch norm as in DCGAN (Radford 2016). What the
discriminator sees is moved by up to two pixels (Zhao 2020), so that 8,000 digits last: those of
recipes/fetch_digits.py, in runs/digits. Latents and moves are fields of the samples, drawn from their noise: a function
of the seed, the epoch and the digit, whatever the layout.
"""

import functools
from functools import partial
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

FOLDER = Path("runs/digits")
FILES = {"train": "train", "validation": "t10k"}
INPUT, LATENTS, WIDTH, MOVE, GROUP = "latents", 64, 32, 2, 16
"""The field that the first unit reads, and its random numbers; channels; pixels of a move; samples of a batch norm."""


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
    """One digit: pixels [1, 28, 28], class, and for the drawn one latents [64 + 10] and moves. Superstep calls this."""
    pixels, classes = digits(split)
    latents = torch.from_numpy(noise.standard_normal(LATENTS).astype(np.float32))
    latents = torch.cat((latents, F.one_hot(classes[index], 10).float()))
    moves = torch.from_numpy(noise.integers(0, 2 * MOVE + 1, (2, 2)))  # of each picture: rows, columns
    return {"latents": latents, "pixels": pixels[index], "moves": moves, "target": classes[index]}


class Pair(nn.Module):
    """A drawn digit and a real one, both moved: [B, 2, 1, 28, 28]."""

    def forward(self, drawn: Tensor, real: Tensor, moves: Tensor) -> Tensor:
        side = torch.arange(28, device=moves.device)
        rows, columns = (moves.unsqueeze(-1) + side).unbind(2)  # [B, 2, 28] each
        pair = F.pad(torch.cat((drawn, real), 1), [MOVE] * 4)
        pair = pair.gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, 28 + 2 * MOVE))
        return pair.gather(3, columns.unsqueeze(2).expand(-1, -1, 28, -1)).unsqueeze(2)


class Each(nn.Sequential):
    """Layers that compute each picture of a pair alone: [B, 2, ...]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def judge(logits: Tensor, targets: Tensor) -> Tensor:
    """The discriminator's loss, of logits [B, 2, 11] for a drawn and a real digit: real or not, then classes."""
    return (F.softplus(logits[:, 0, 0]) + F.softplus(-logits[:, 1, 0])).sum()


def fool(logits: Tensor, targets: Tensor) -> Tensor:
    """The generator's loss, of the same logits."""
    return F.softplus(-logits[:, 0, 0]).sum()


def class_of(number: int, logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of the classes of the drawn digits, number 0, or of the real ones, number 1."""
    return F.cross_entropy(logits[:, number, 1:].float(), targets, reduction="sum")


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """Two units that draw, the pair, two units that judge. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    C, rectify = WIDTH, partial(nn.LeakyReLU, 0.2)
    modules = [
        nn.Sequential(
            nn.Linear(LATENTS + 10, 2 * C * 49, bias=False), nn.Unflatten(1, (2 * C, 7, 7)),
            BatchNorm(2 * C, GROUP), nn.ReLU(),
        ),
        nn.Sequential(
            nn.ConvTranspose2d(2 * C, C, 4, 2, 1, bias=False), BatchNorm(C, GROUP), nn.ReLU(),
            nn.ConvTranspose2d(C, 1, 4, 2, 1), nn.Sigmoid(),
        ),
        Pair(),
        nn.Sequential(
            Each(nn.Conv2d(1, C, 4, 2, 1), rectify()), nn.Dropout(0.3),
            Each(nn.Conv2d(C, 2 * C, 4, 2, 1), rectify()), nn.Dropout(0.3),
        ),
        Each(nn.Flatten(), nn.Linear(2 * C * 49, 11)),
    ]  # fmt: skip
    for layer in (layer for module in modules for layer in module.modules()):
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(layer.weight, 0, 0.02)
    return as_units(
        modules,
        inputs={2: [1, "pixels", "moves"]},
        loss={
            "judge": {"judge": judge, "real_class": partial(class_of, 1)},
            "fool": {"fool": fool, "drawn_class": partial(class_of, 0)},
        },
        phases={"judge": (3, 4), "fool": (0, 1)},
    )

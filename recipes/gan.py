"""A generative adversarial network (Goodfellow 2014) that draws digits of a given class (AC-GAN, Odena 2017).

A step has two phases. In "judge" the discriminator learns to tell real digits from drawn ones, and the class of real
ones; in "fool" the generator learns to draw digits that it takes for real (the loss of section 3 that does not
saturate), and for the class that was given; no real digit is computed there. Convolutions and batch norm as in DCGAN
(Radford 2016). Digits are moved by up to two pixels (Zhao 2020), so that the 8,000 of recipes/fetch_digits.py, in
runs/digits, last. Latents and moves are fields of the samples, drawn from their noise, whatever the layout.
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


class Move(nn.Module):
    """Digits [B, 1, 28, 28], moved by a number of the moves."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, digits: Tensor, moves: Tensor) -> Tensor:
        side = torch.arange(28, device=moves.device)
        rows, columns = (moves[:, self.number].unsqueeze(-1) + side).unbind(1)  # [B, 28] each
        wide = F.pad(digits, [MOVE] * 4).gather(2, rows[:, None, :, None].expand(-1, -1, -1, 28 + 2 * MOVE))
        return wide.gather(3, columns[:, None, None].expand(-1, -1, 28, -1))


class Together(nn.Module):
    """Logits of one or two digits each, [B, 1 or 2, 11]."""

    def forward(self, *logits: Tensor) -> Tensor:
        return torch.stack(logits, 1)


def judge(logits: Tensor, targets: Tensor) -> Tensor:
    """The discriminator's loss, of logits [B, 2, 11] for a drawn and a real digit: real or not, then classes."""
    return (F.softplus(logits[:, 0, 0]) + F.softplus(-logits[:, 1, 0])).sum()


def fool(logits: Tensor, targets: Tensor) -> Tensor:
    """The generator's loss, of the logits of the drawn digit."""
    return F.softplus(-logits[:, 0, 0]).sum()


def class_of(number: int, logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of the classes of the drawn digits, number 0, or of the real ones, number 1."""
    return F.cross_entropy(logits[:, number, 1:].float(), targets, reduction="sum")


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """Two units that draw, three that judge that, three of the same weights for a real digit. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    C, rectify = WIDTH, partial(nn.LeakyReLU, 0.2)
    convolutions = [nn.Conv2d(before, after, 4, 2, 1) for before, after in ((1, C), (C, 2 * C))]
    look = nn.Sequential(*(part for each in convolutions for part in (each, rectify(), nn.Dropout(0.3))))
    say = nn.Sequential(nn.Flatten(), nn.Linear(2 * C * 49, 11))
    modules = [
        nn.Sequential(
            nn.Linear(LATENTS + 10, 2 * C * 49, bias=False), nn.Unflatten(1, (2 * C, 7, 7)),
            BatchNorm(2 * C, GROUP), nn.ReLU(),
        ),
        nn.Sequential(
            nn.ConvTranspose2d(2 * C, C, 4, 2, 1, bias=False), BatchNorm(C, GROUP), nn.ReLU(),
            nn.ConvTranspose2d(C, 1, 4, 2, 1), nn.Sigmoid(),
        ),
        Move(0), look, say, Move(1), look, say, Together(),
    ]  # fmt: skip
    for layer in (layer for module in modules for layer in module.modules()):
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(layer.weight, 0, 0.02)
    return as_units(
        modules,
        inputs={2: [1, "moves"], 5: ["pixels", "moves"], 8: [4, 7]},
        loss={
            "judge": {"judge": judge, "real_class": partial(class_of, 1)},
            "fool": {"fool": fool, "drawn_class": partial(class_of, 0)},
        },
        phases={"judge": (3, 4, 6, 7), "fool": (0, 1)},
        phase_inputs={"fool": [4]},
    )

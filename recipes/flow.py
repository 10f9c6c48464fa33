"""From a caption to a picture of 32 x 32 pixels: a transformer that is trained by rectified flow (Liu 2022).

The model sees a picture of recipes/drawn_scenes.py mixed with noise, (1 - t) · pixels + t · noise, and the words of its
caption. It predicts the pixels (Li 2025), from which (mixture - pixels) / t is the direction as t grows. Noise and t
belong to the seed, the step and the sample. B samples, L words, P patches, S = L + P, D width.
"""

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.model.custom.units_from_modules import as_units
from superstep.model.custom.within_samples import attend_within
from superstep.model.decoder import Block
from superstep.model.norm import RMSNorm
from superstep.model.rope import Rope
from superstep.model.unit import UnitSpec
from superstep.numerics.noise import Noise
from superstep.plan.config import RunConfig
from superstep.plan.model.shape import ModelShape
from superstep.plan.user_file import run_file

scenes = run_file(Path(__file__).with_name("drawn_scenes.py"), "drawn_scenes")
SCENES = {"train": 4000, "validation": 1024}
INPUT, LONGEST = "pixels", scenes.LONGEST
PATCH, PATCHES, NUMBERS = 8, (scenes.SIDE // 8) ** 2, 3 * 8**2
"""Pixels of a patch's side, patches of a picture, and numbers of a patch."""


def length(split: str) -> int:
    """The number of pictures. Superstep calls this."""
    return SCENES[split]


def sample(split: str, index: int, noise: np.random.Generator, caption: str = "") -> dict[str, Tensor]:
    """A picture, its full caption or another, and the picture again as the target. Superstep calls this."""
    words = fill_caption(caption or scenes.full_caption(scenes.scene(split, index)))
    pixels = scenes.to_pixels(scenes.picture(split, index))
    return {"pixels": pixels, "words": words, "target": pixels}


def fill_caption(caption: str) -> Tensor:
    """The numbers of its words, [L]."""
    words = torch.tensor(scenes.number_words(caption))[:LONGEST]
    return F.pad(words, (0, LONGEST - len(words)))


def cut(pixels: Tensor) -> Tensor:
    """A picture's patches: [B, 3, 32, 32] to [B, P, 192]."""
    return F.pixel_unshuffle(pixels, PATCH).flatten(2).mT


class Mix(nn.Module):
    """Pictures and noise: of each patch the mixture and t, [B, P, 193]."""

    def forward(self, pixels: Tensor, *, noise: Noise) -> Tensor:
        drawn = noise.normal("noise", pixels).to(pixels.dtype)
        time = noise.uniform("time", pixels[:, :1, :1, :1]).to(pixels.dtype)
        return torch.cat([cut((1 - time) * pixels + time * drawn), time.view(-1, 1, 1).expand(-1, PATCHES, 1)], -1)


class Read(nn.Module):
    """Words, each with those beside it, and patches in one sequence, with their positions, and with t as sinusoids."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.patches = nn.Embedding(len(scenes.WORDS), width), nn.Linear(NUMBERS, width)
        self.beside = nn.Conv1d(width, width, 5, padding=2)
        self.times = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.positions = nn.Parameter(torch.randn(LONGEST + PATCHES, width) * 0.5)
        self.register_buffer("rates", torch.exp(-math.log(1000) * torch.arange(width // 2) / (width // 2)) * 100)

    def forward(self, mixed_BPX: Tensor, words_BL: Tensor) -> Tensor:
        angles = mixed_BPX[:, :1, -1:].float() * self.rates
        time = self.times(torch.cat([angles.sin(), angles.cos()], -1).to(mixed_BPX.dtype))
        words_BLD, patches_BPD = self.words(words_BL), self.patches(mixed_BPX[..., :NUMBERS])
        words_BLD = words_BLD + self.beside(words_BLD.mT).mT
        return torch.cat([words_BLD, patches_BPD], 1) + self.positions + time


class See(Block):
    """A block of a decoder in which all words and patches see each other."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        places_BS = torch.zeros(x_BSD.shape[:2], dtype=torch.long, device=x_BSD.device)
        return super().forward(x_BSD, attend=partial(attend_within, numbers_BS=places_BS), positions=places_BS)


class Predict(nn.Module):
    """The pixels, [B, 3, 32, 32]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = RMSNorm(width, 1e-5), nn.Linear(width, NUMBERS)

    def forward(self, x_BSD: Tensor) -> Tensor:
        pixels_BPX = self.out(self.norm(x_BSD[:, LONGEST:]))
        return F.pixel_shuffle(pixels_BPX.mT.unflatten(-1, (scenes.SIDE // PATCH, -1)), PATCH)


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """What mixes, what reads, the blocks, what predicts. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    width, layers, heads = config.model.width or 96, config.model.layers or 3, config.model.heads or 3
    shape = ModelShape(
        family="llama", layers=layers, width=width, heads=heads, kv_heads=heads, head_dim=width // heads, ffn=3 * width,
        vocab=len(scenes.WORDS), tied=False, qk_norm=True, norm_eps=1e-5, rope_theta=1e4, rope_scaling=None,
        max_tokens=LONGEST + PATCHES,
    )  # fmt: skip
    return as_units(
        [Mix(), Read(width), *(See(shape, Rope(shape)) for _ in range(layers)), Predict(width)],
        inputs={0: ["pixels"], 1: [0, "words"]},
        takes={0: ["noise"]},
        loss=lambda output, targets: (output.float() - targets).square().sum(),
    )

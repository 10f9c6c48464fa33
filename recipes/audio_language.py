"""The language of spoken prompts, by an encoder of Whisper's shape (Radford 2022): ragged samples of sound.

`python recipes/fetch_prompts.py` writes the prompts into runs/prompts. A sample is the log-mel spectrogram of up to 4
seconds, and its language. Several share a row; convolutions and attention stay within each of them. Two convolutions
halve the frames, sinusoids tell their positions, and then come a decoder's blocks, with attention in both directions.

    B  rows    F  frames of a row    S  places, half as many    D  width
"""

import functools
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.data.samples.log_mel import BANDS, HOP, RATE, hide_parts, log_mel
from superstep.data.samples.sounds import list_sounds, read_sound
from superstep.model.custom.units_from_modules import as_units
from superstep.model.custom.within_samples import attend_within, mean_within, neighbours_within, positions_within
from superstep.model.decoder import Block
from superstep.model.rope import Rope
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.model.shape import ModelShape

FOLDER = Path("runs/prompts")
LANGUAGES = ["en", "es", "fr", "it", "ru"]
LONGEST = 400
"""Frames of a sample, 10 ms each; of a longer prompt training takes another part in each epoch."""
CAPACITY = {"mel": 800, "target": 16}
INPUT = "mel"


@functools.cache
def prompts(split: str) -> list[dict]:
    return list_sounds(FOLDER / f"{split}.jsonl")


@functools.cache
def mel(split: str, index: int) -> Tensor:
    """The whole spectrogram of a prompt, [frames, 80]."""
    return log_mel(read_sound(prompts(split)[index]["audio"]))


def length(split: str) -> int:
    """The number of prompts in a split. Superstep calls this."""
    return len(prompts(split))


def size(split: str, index: int) -> dict[str, int]:
    """The frames of a sample, an even number, and its one target. Superstep calls this."""
    frames = int(prompts(split)[index]["seconds"] * RATE + 1e-6) // HOP
    return {"mel": min(frames, LONGEST) // 2 * 2, "target": 1}


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """A prompt, or a part of it, and the number of its language. Superstep calls this."""
    frames, whole = size(split, index)["mel"], mel(split, index)
    target = torch.tensor([LANGUAGES.index(prompts(split)[index]["language"])])
    if split != "train":
        return {"mel": whole[:frames], "target": target}
    start = int(noise.integers(len(whole) - frames + 1))
    return {"mel": hide_parts(whole[start : start + frames], noise), "target": target}


class Stem(nn.Module):
    """Two convolutions of three frames, the second of every other one, and sinusoidal positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Linear(3 * BANDS, width), nn.Linear(3 * width, width)
        self.register_buffer("rates", torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2 - 1)))

    def forward(self, mel_BF: Tensor, numbers_BF: Tensor) -> Tensor:
        x_BFD = F.gelu(self.conv1(neighbours_within(mel_BF, numbers_BF)))
        x_BSD = F.gelu(self.conv2(neighbours_within(x_BFD, numbers_BF)[:, ::2]))
        angles = positions_within(numbers_BF[:, ::2]).unsqueeze(-1) * self.rates
        return x_BSD + torch.cat([angles.sin(), angles.cos()], -1).to(x_BSD.dtype)


class Encode(Block):
    """A block of a decoder that sees the whole sample. As the stem adds positions, nothing is rotated: all are 0."""

    def forward(self, x_BSD: Tensor, numbers_BF: Tensor) -> Tensor:
        numbers_BS = numbers_BF[:, ::2]
        attend = partial(attend_within, numbers_BS=numbers_BS)
        return super().forward(x_BSD, attend=attend, positions=torch.zeros_like(numbers_BS))


class Classify(nn.Linear):
    """Logits of the languages, from the mean over each sample."""

    def forward(self, x_BSD: Tensor, numbers_BF: Tensor) -> Tensor:
        return super().forward(mean_within(x_BSD, numbers_BF[:, ::2], CAPACITY["target"]))


def make_shape(config: RunConfig, classes: int) -> ModelShape:
    """The sizes of the blocks."""
    width, layers, heads = config.model.width or 96, config.model.layers or 2, config.model.heads or 3
    return ModelShape(
        family="llama", layers=layers, width=width, heads=heads, kv_heads=heads, head_dim=width // heads, ffn=3 * width,
        vocab=classes, tied=False, qk_norm=False, norm_eps=1e-5, rope_theta=1e4, rope_scaling=None,
        max_tokens=CAPACITY["mel"], dropout=config.model.dropout,
    )  # fmt: skip


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """The stem, the blocks and the classifier. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    shape = make_shape(config, len(LANGUAGES))
    blocks = [Encode(shape, Rope(shape)) for _ in range(shape.layers)]
    modules = [Stem(shape.width), *blocks, Classify(shape.width, len(LANGUAGES))]
    inputs = {n: ("mel" if n == 0 else n - 1, "mel.sample") for n in range(len(modules))}
    return as_units(modules, inputs=inputs)

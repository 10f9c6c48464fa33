"""What spoken prompts say, letter by letter: Whisper's encoder and decoder (Radford 2022), on ragged samples.

The encoder is that of recipes/audio_language.py. A block of the decoder attends to all sounds of its sample, then to
the letters before. Sounds and letters are rotated by their time; a letter's is its number times PACE. As biases start
at 1, attention begins near that time (as in Deep Voice 3, Ping 2017). F frames are S places of sound; T letters.
"""

import functools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from superstep.data.samples.log_mel import HOP, RATE, hide_parts, log_mel
from superstep.data.samples.sounds import list_sounds, read_sound
from superstep.model.custom.units_from_modules import as_units
from superstep.model.custom.within_samples import attend_within, positions_within
from superstep.model.decoder import Block
from superstep.model.norm import RMSNorm
from superstep.model.rope import Rope
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.model.shape import ModelShape
from superstep.plan.user_file import run_file

spoken = run_file(Path(__file__).with_name("audio_language.py"), "audio_language")
LETTERS = "\n 'abcdefghijklmnopqrstuvwxyz"  # the first stands before and behind all others
CAPACITY = {"mel": 1600, "tokens": 320, "target": 320}
INPUT = "mel"
SAMPLES, SPEEDS, MOST = 4000, (0.9, 1.0, 1.1), 3
"""A training sample is up to three prompts, one after another, each at one of three speeds (Ko 2015)."""
PACE = 3.5  # places of sound, 20 ms each, to a letter


@functools.cache
def prompts(split: str) -> list[dict]:
    """The English prompts with words, if not too long; of those held out, the ones with words that are in no other."""
    short = [each for each in list_sounds(spoken.FOLDER / f"{split}.jsonl") if frames(each, 0.9) <= CAPACITY["mel"]]
    known = {"", *({each["text"] for each in prompts("train")} if split != "train" else ())}
    return [each for each in short if each.get("text", "") not in known]


def frames(prompt: dict, speed: float) -> int:
    """The frames of a prompt at a speed, an even number."""
    return round(prompt["seconds"] * round(RATE / speed)) // HOP // 2 * 2


@functools.cache
def parts(split: str, index: int) -> list[tuple[dict, float]]:
    """The prompts of a sample, and their speeds."""
    if split != "train":
        return [(prompts(split)[index], 1.0)]
    draw, drawn = random.Random(index), []
    for _ in range(draw.randint(1, MOST)):
        part = draw.choice(prompts(split)), draw.choice(SPEEDS)
        if sum(frames(*each) for each in (*drawn, part)) <= CAPACITY["mel"]:
            drawn.append(part)
    return drawn


mel = functools.cache(lambda path, speed: log_mel(read_sound(path, round(RATE / speed))))


def length(split: str) -> int:
    """The number of samples. Superstep calls this."""
    return SAMPLES if split == "train" else len(prompts(split))


def size(split: str, index: int) -> dict[str, int]:
    """The frames of a sample, and its letters with the end. Superstep calls this."""
    letters = sum(len(prompt["text"]) + 1 for prompt, _ in parts(split, index))
    return {"mel": sum(frames(*part) for part in parts(split, index)), "tokens": letters, "target": letters}


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """A sound, its letters, and each letter's next one. Superstep calls this."""
    heard = torch.cat([mel(each["audio"], speed)[: frames(each, speed)] for each, speed in parts(split, index)])
    words = " ".join(prompt["text"] for prompt, _ in parts(split, index))
    said = torch.tensor([LETTERS.index(letter) for letter in f"\n{words}\n"])
    return {"mel": hide_parts(heard, noise) if split == "train" else heard, "tokens": said[:-1], "target": said[1:]}


class Decode(Block):
    """A block that attends to the sounds of its sample first."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape, Rope(shape))
        self.times, self.head_dim = Rope(replace(shape, rope_theta=100.0)), shape.head_dim
        self.letters_norm, self.sounds_norm = (RMSNorm(shape.width, shape.norm_eps) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(shape.width, shape.width) for _ in range(4))
        nn.init.ones_(self.query.bias)
        nn.init.ones_(self.key.bias)

    def forward(self, x_BTD: Tensor, sounds_BSD: Tensor, letters_BT: Tensor, mel_BF: Tensor, **given: object) -> Tensor:
        numbers_BS, sounds_BSD = mel_BF[:, ::2], self.sounds_norm(sounds_BSD)
        read = self.query(self.letters_norm(x_BTD)), self.key(sounds_BSD), self.value(sounds_BSD)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in read)
        q, k = self.times(q, positions_within(letters_BT) * PACE), self.times(k, positions_within(numbers_BS))
        heard = attend_within(q, k, v, numbers_BS=letters_BT, key_numbers_BT=numbers_BS).flatten(2)
        return super().forward(x_BTD + self.dropout(self.out(heard)), **given)


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """The encoder, then the decoder, whose blocks all take the encoder's output. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    shape = spoken.make_shape(config, len(LETTERS))
    last, width = shape.layers, shape.width
    encoder = [spoken.Stem(width), *(spoken.Encode(shape, Rope(shape)) for _ in range(last))]
    blocks = range(last + 2, 2 * last + 2)
    head = nn.Sequential(RMSNorm(width, shape.norm_eps), nn.Linear(width, shape.vocab))
    heard = {n: ("mel" if n == 0 else n - 1, "mel.sample") for n in range(last + 1)}
    said = {n: (n - 1, last, "tokens.sample", "mel.sample") for n in blocks}
    return as_units(
        [*encoder, nn.Embedding(shape.vocab, width), *(Decode(shape) for _ in blocks), head],
        inputs=heard | {last + 1: ["tokens"]} | said,
        takes=dict.fromkeys(blocks, ("attend", "positions")),
    )

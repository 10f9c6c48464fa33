"""What spoken prompts say, letter by letter: an encoder with a CTC loss (Graves 2006), and a decoder that reads it.

`python recipes/fetch_prompts.py` writes the prompts into runs/prompts. The model is in recipes/listener.py. A step has
two losses (Kim 2017): "ctc" of the encoder, and "letters" of the decoder.
"""

import functools
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from superstep.data.samples.log_mel import BANDS, HOP, RATE, hide_parts, log_mel
from superstep.data.samples.sounds import list_sounds, read_sound
from superstep.model.custom.units_from_modules import as_units
from superstep.model.decoder import Block
from superstep.model.rope import Rope
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.user_file import run_file

spoken = run_file(Path(__file__).with_name("audio_language.py"), "audio_language")
listener = run_file(Path(__file__).with_name("listener.py"), "listener")
LETTERS = "\n 'abcdefghijklmnopqrstuvwxyz"  # the first stands before and behind all others, and is CTC's blank
CAPACITY = {"mel": 1200, "tokens": 256, "target": 256}
INPUT, SAMPLES, SPEEDS = "mel", 4000, (0.9, 0.95, 1.0, 1.05, 1.1)
"""The first unit's field; a training sample is a prompt at one of these speeds (Ko 2015)."""


@functools.cache
def prompts(split: str) -> list[dict]:
    """The English prompts with words, if not too long; of those held out, the ones with words that are in no other."""
    short = [each for each in list_sounds(spoken.FOLDER / f"{split}.jsonl") if frames(each, 0.9) <= CAPACITY["mel"]]
    known = {"", *({each["text"] for each in prompts("train")} if split != "train" else ())}
    return [each for each in short if each.get("text", "") not in known]


def frames(prompt: dict, speed: float) -> int:
    """The frames of a prompt at a speed, a multiple of 4."""
    return round(prompt["seconds"] * round(RATE / speed)) // HOP // 4 * 4


def part(split: str, index: int) -> tuple[dict, float]:
    """The prompt of a sample, and its speed."""
    draw = random.Random(index)
    return (draw.choice(prompts(split)), draw.choice(SPEEDS)) if split == "train" else (prompts(split)[index], 1.0)


mel = functools.cache(lambda path, speed: 2 * log_mel(read_sound(path, round(RATE / speed))) + 1)


def length(split: str) -> int:
    """The number of samples. Superstep calls this."""
    return SAMPLES if split == "train" else len(prompts(split))


def size(split: str, index: int) -> dict[str, int]:
    """The frames of a sample, and its letters with the end. Superstep calls this."""
    prompt, speed = part(split, index)
    return {"mel": frames(prompt, speed)} | dict.fromkeys(("tokens", "target"), len(prompt["text"]) + 1)


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """A sound, its letters, and each letter's next one. Superstep calls this."""
    prompt, speed = part(split, index)
    heard = mel(prompt["audio"], speed)[: frames(prompt, speed)]
    said = torch.tensor([LETTERS.index(letter) for letter in f"\n{prompt['text']}\n"])
    return {"mel": hide_parts(heard, noise) if split == "train" else heard, "tokens": said[:-1], "target": said[1:]}


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """The encoder, what it finds beside each letter, and the decoder. Superstep calls this."""
    torch.manual_seed(config.train.seed)  # every rank starts with the same values
    shape = spoken.make_shape(config, len(LETTERS))
    last, width, rate = shape.layers, shape.width, shape.dropout
    encoder = [listener.Stem(BANDS, width), *(listener.Hear(width, rate) for _ in range(last))]
    found = listener.Find(width, shape.vocab)
    decoder = [listener.Read(width, shape.vocab, rate), Block(shape, Rope(shape)), listener.Write(width, shape.vocab)]
    heard = {n: ("mel" if n == 0 else n - 1, "mel.sample") for n in range(last + 1)}
    beside = {last + 1: (last, "mel.sample", "tokens", "tokens.sample"), last + 2: ("tokens", last + 1)}
    return as_units(
        [*encoder, found, *decoder],
        inputs=heard | beside | {last + 4: (last + 3, last + 1)},
        takes={last + 3: ("attend", "positions")},
        loss={"letters": listener.loss_of_letters, "ctc": listener.loss_of_sounds},
    )

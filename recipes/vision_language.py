"""Questions on composed pictures (what, where, how many), answered by an encoder and decoder of Qwen3-VL's shape.

`python recipes/fetch_emoji.py` writes emoji of three makers into runs/emoji. A picture has nine cells, some with emoji,
made on the spot. Its three questions are of one sort; answers are no part of the text. Pictures of validation, and
of the split "test", show pairs of kinds that no picture of training shows together; each has its own.

    tokens    P P P P P P P P P  what  cell  what  cell  what  cell    each P is a cell: four patches of 8 x 8 pixels
    target    . . . . . . . . .  .     kind  .     kind  .     kind
"""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.data.samples.idx import read_idx
from superstep.data.samples.patches import cut_patches, place_tokens
from superstep.model.multimodal.qwen3_vl import vision_language_units
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.model.multimodal.vision_shape import VisionLanguageShape, VisionShape
from superstep.plan.model.shape import ModelShape

MAKERS = ("google", "twitter", "facebook")
KINDS, SIDE, MOST, ASKED = 16, 3, 3, 3
"""Kinds of emoji, cells of a side, the most emoji of one kind, and the questions on a picture."""
CELLS, PIXELS, PATCH, MERGE = SIDE**2, 16, 8, 2
QUESTIONS = ("what", "where", "how many")
IMAGE, KIND, CELL, NUMBER, QUESTION, VOCAB = 1, 2, 18, 27, 30, 33
"""The token of a picture, and the first of each kind of word."""
TOKENS, PATCHES = CELLS + 2 * ASKED, CELLS * MERGE**2
VISION = VisionShape(
    layers=2, width=64, heads=2, ffn=256, patch=PATCH, frames=1, merge=MERGE, side=6, outputs=64, init_std=0.1
)
CAPACITY = dict.fromkeys(("tokens", "positions", "target"), 16 * TOKENS)
CAPACITY |= dict.fromkeys(("pixels", "patches"), 16 * PATCHES)
PLACEHOLDERS = {"pixels": (IMAGE, MERGE**2)}
INPUT = "tokens"
HELD_OUT = {"validation": 0, "test": 2}  # pairs of kinds with such a sum, modulo 13


@functools.cache
def emoji() -> np.ndarray:
    """Emoji with opacity, [makers, kinds, 4, 16, 16], from 0 to 1."""
    makers = [read_idx(Path(f"runs/emoji/{maker}.idx")) for maker in MAKERS]
    chosen = [pictures[:: len(pictures) // KINDS][:KINDS].float() / 255 for pictures in makers]
    return torch.stack([F.avg_pool2d(pictures, 64 // PIXELS) for pictures in chosen]).numpy()


def length(split: str) -> int:
    """The number of questions in a split. Superstep calls this."""
    return 40000 if split == "train" else 1600


def size(split: str, index: int) -> dict[str, int]:
    """The first dim of each field, and the targets with a loss. Superstep calls this."""
    return {**{name: room // 16 for name, room in CAPACITY.items()}, "counted": ASKED}


def is_held_out(one: int, other: int, split: str) -> bool:
    """Whether two kinds are a pair that a split holds out."""
    return one != other and (one + other) % 13 == HELD_OUT[split]


def choose_kinds(split: str, count: int, noise: np.random.Generator) -> list[int]:
    """Different kinds: in training without a held-out pair, elsewhere the first two are one."""
    order = noise.permutation(KINDS).tolist()
    if split != "train":
        second = next(kind for kind in order if is_held_out(order[0], kind, split))
        return [order[0], second, *(kind for kind in order[1:] if kind != second)][:count]
    chosen = list[int]()
    for kind in order:
        if not any(is_held_out(kind, other, held) for other in chosen for held in HELD_OUT):
            chosen.append(kind)
    return chosen[:count]


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """A picture and its questions. Superstep calls this."""
    question = index % len(QUESTIONS)
    kinds, cells = choose_kinds(split, ASKED + int(noise.integers(3)), noise), noise.permutation(CELLS).tolist()
    numbers = noise.integers(1, MOST + 1, ASKED).tolist() if QUESTIONS[question] == "how many" else [1] * ASKED
    shown = [kind for kind, number in zip(kinds, numbers, strict=False) for _ in range(number)] + kinds[ASKED:]
    every = zip(kinds, cells, numbers, strict=False)
    triples = [(KIND + kind, CELL + cell, NUMBER + number - 1) for kind, cell, number in every]
    asked, answer = {"what": (1, 0), "where": (0, 1), "how many": (0, 2)}[QUESTIONS[question]]
    pixels, patches = cut_patches(compose(cells, shown, noise), VISION)
    words = [word for triple in triples for word in (QUESTION + question, triple[asked])]
    target = torch.full((TOKENS,), -100)
    target[CELLS + 1 :: 2] = torch.tensor([triple[answer] for triple in triples])
    tokens = torch.tensor([IMAGE] * CELLS + words)
    positions = place_tokens(tokens, IMAGE, [(SIDE * MERGE, SIDE * MERGE)], MERGE)
    return {"tokens": tokens, "positions": positions, "target": target, "pixels": pixels, "patches": patches}


def compose(cells: list[int], kinds: list[int], noise: np.random.Generator) -> Tensor:
    """A picture of emoji in the first cells, on a ground of one colour: [3, 48, 48], from -1 to 1."""
    picture = np.empty((3, SIDE, PIXELS, SIDE, PIXELS), np.float32)
    picture[:] = noise.uniform(0.7, 1, (3, 1, 1, 1, 1))
    for cell, kind, maker in zip(cells, kinds, noise.integers(len(MAKERS), size=CELLS), strict=False):
        drawn, at = emoji()[maker, kind], picture[:, cell // SIDE, :, cell % SIDE]
        at += drawn[3] * (drawn[:3] - at)
    return torch.from_numpy(picture * 2 - 1).view(3, SIDE * PIXELS, SIDE * PIXELS)


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """The encoder and the decoder. Superstep calls this."""
    width, layers, heads = config.model.width or 64, config.model.layers or 2, config.model.heads or 2
    decoder = ModelShape(
        family="qwen3", layers=layers, width=width, heads=heads, kv_heads=heads, head_dim=width // heads, ffn=3 * width,
        vocab=VOCAB, tied=True, qk_norm=True, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_tokens=TOKENS,
        init_std=VISION.init_std,
    )  # fmt: skip
    vision = replace(VISION, layers=layers, width=width, heads=heads, ffn=4 * width, outputs=width)
    shape = VisionLanguageShape(vision=vision, decoder=decoder, image_token=IMAGE, sections=(6, 5, 5))
    return vision_language_units(shape)

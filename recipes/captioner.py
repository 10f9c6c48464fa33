"""What is on a picture, in a short or a full caption, by a small Qwen3-VL (Bai 2025) that learns from 2,000 pictures.

A sample is a picture of recipes/drawn_scenes.py, a word that says which caption, and the caption, which alone is
learned. Rows of the encoder stand in the places of the tokens PICTURE.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from superstep.data.samples.patches import cut_patches, place_tokens
from superstep.model.multimodal.qwen3_vl import vision_language_units
from superstep.model.unit import UnitSpec
from superstep.numerics.loss import IGNORE
from superstep.plan.config import RunConfig
from superstep.plan.model.multimodal.vision_shape import VisionLanguageShape, VisionShape
from superstep.plan.model.shape import ModelShape
from superstep.plan.user_file import run_file

scenes = run_file(Path(__file__).with_name("drawn_scenes.py"), "drawn_scenes")
SCENES = {"train": 2000, "validation": 200}
STYLES = {"full": scenes.full_caption, "short": scenes.short_caption}
PATCH, MERGE = 8, 2
PATCHES = (scenes.SIDE // PATCH) ** 2
SEEN = PATCHES // MERGE**2
"""Tokens of a picture."""
PICTURE, FIRST_STYLE, VOCAB = len(scenes.WORDS), len(scenes.WORDS) + 1, len(scenes.WORDS) + 3
ROOM, SAMPLES = SEEN + 1 + scenes.LONGEST, 8
"""Tokens of the longest sample, and samples of a row."""
CAPACITY = {
    **dict.fromkeys(("tokens", "positions", "target"), ROOM * SAMPLES),
    **dict.fromkeys(("pixels", "patches"), PATCHES * SAMPLES),
}
PLACEHOLDERS = {"pixels": (PICTURE, MERGE**2)}
INPUT = "tokens"


def length(split: str) -> int:
    """A sample for each picture and style. Superstep calls this."""
    return SCENES[split] * len(STYLES)


def caption(split: str, index: int) -> list[int]:
    """The words of a sample's caption, and the end."""
    style = [*STYLES.values()][index % len(STYLES)]
    return [*scenes.number_words(style(scenes.scene(split, index // len(STYLES)))), 0]


def size(split: str, index: int) -> dict[str, int]:
    """The first dims of a sample's fields. Superstep calls this."""
    words = len(caption(split, index))
    sizes = dict.fromkeys(("tokens", "positions", "target"), SEEN + words)
    return sizes | {"counted": words, "pixels": PATCHES, "patches": PATCHES}


def sample(split: str, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
    """A picture and its caption. Superstep calls this."""
    scene, style = divmod(index, len(STYLES))
    picture = scenes.to_pixels(scenes.picture(split, scene))
    if split == "train":
        picture = picture + 0.05 * torch.from_numpy(noise.standard_normal(picture.shape, np.float32))
    words = torch.tensor(caption(split, index))
    target = torch.cat([torch.full((SEEN,), IGNORE), words])
    return ask(picture, style, words[:-1]) | {"target": target}


def ask(picture: Tensor, style: int, words: Tensor) -> dict[str, Tensor]:
    """The fields of a picture [3, 32, 32], the style, and the first words of its caption."""
    pixels, patches = cut_patches(picture, shape(RunConfig()).vision)
    tokens = torch.cat([torch.full((SEEN,), PICTURE), torch.tensor([FIRST_STYLE + style]), words])
    side = scenes.SIDE // PATCH
    positions = place_tokens(tokens, PICTURE, [(side, side)], MERGE)
    return {"tokens": tokens, "positions": positions, "pixels": pixels, "patches": patches}


def shape(config: RunConfig) -> VisionLanguageShape:
    """The sizes of encoder and decoder."""
    width, layers, heads = config.model.width or 96, config.model.layers or 3, config.model.heads or 3
    vision = VisionShape(
        layers=2, width=width, heads=heads, ffn=2 * width, patch=PATCH, frames=1, merge=MERGE,
        side=scenes.SIDE // PATCH, outputs=width, init_std=0.1,
    )  # fmt: skip
    decoder = ModelShape(
        family="qwen3", layers=layers, width=width, heads=heads, kv_heads=heads, head_dim=width // heads,
        ffn=3 * width, vocab=VOCAB, tied=True, qk_norm=True, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
        max_tokens=CAPACITY["tokens"], init_std=0.1,
    )  # fmt: skip
    pairs = width // heads // 2
    return VisionLanguageShape(
        vision=vision, decoder=decoder, image_token=PICTURE, sections=(pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
    )


def units(config: RunConfig) -> tuple[UnitSpec, ...]:
    """The encoder, then the decoder. Superstep calls this."""
    return vision_language_units(shape(config))

"""Samples of text with no to four uneven pictures, made on the spot, and a model of Qwen3-VL's shape for them."""

import torch

from superstep.data.samples.patches import cut_patches, place_tokens
from superstep.model.multimodal.qwen3_vl import vision_language_units
from superstep.plan.model.multimodal.vision_shape import VisionLanguageShape, VisionShape
from superstep.plan.model.shape import ModelShape

PICTURE, MERGE, WORDS = 500, 2, 499
CAPACITY = {"tokens": 128, "positions": 128, "target": 128, "pixels": 384, "patches": 384}
PLACEHOLDERS = {"pixels": (PICTURE, MERGE**2)}
INPUT = "tokens"
VISION = VisionShape(layers=5, width=128, heads=4, ffn=512, patch=4, frames=1, merge=MERGE, side=16, outputs=128)
DECODER = ModelShape(
    family="qwen3", layers=4, width=128, heads=4, kv_heads=4, head_dim=32, ffn=384, vocab=512, tied=False, qk_norm=True,
    norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_tokens=128,
)  # fmt: skip
SHAPE = VisionLanguageShape(vision=VISION, decoder=DECODER, image_token=PICTURE, sections=(6, 5, 5))
SIDES = (4, 6, 8, 10, 14)


def length(split):
    """Superstep calls this."""
    return 2000 if split == "train" else 40


def parts(index):
    """Words, and rows and columns of patches of each picture: uneven from sample to sample."""
    drawn = torch.Generator().manual_seed(index)
    pictures = [
        tuple(SIDES[n] for n in torch.randint(len(SIDES), (2,), generator=drawn).tolist())
        for _ in range(int(torch.randint(5, (1,), generator=drawn)))
    ]
    while sum(rows * columns for rows, columns in pictures) > CAPACITY["pixels"] // 2:
        pictures.pop()
    return 8 + int(torch.randint(24, (1,), generator=drawn)), pictures


def size(split, index):
    """Superstep calls this."""
    words, pictures = parts(index)
    patches = sum(rows * columns for rows, columns in pictures)
    tokens = words + patches // MERGE**2
    return {"tokens": tokens, "positions": tokens, "target": tokens, "pixels": patches, "patches": patches}


def sample(split, index, noise):
    """Superstep calls this."""
    words, pictures = parts(index)
    tokens = torch.cat([
        *(torch.full((rows * columns // MERGE**2,), PICTURE) for rows, columns in pictures),
        torch.from_numpy(noise.integers(1, WORDS, words)),
    ])  # fmt: skip
    drawn = [torch.from_numpy(noise.normal(size=(3, 4 * rows, 4 * columns))).float() for rows, columns in pictures]
    cut = [cut_patches(picture, VISION) for picture in drawn]
    return {
        "tokens": tokens,
        "positions": place_tokens(tokens, PICTURE, pictures, MERGE),
        "pixels": torch.cat([torch.zeros(0, VISION.pixels), *(pixels for pixels, _ in cut)]),
        "patches": torch.cat([torch.zeros(0, 4, dtype=torch.long), *(patches for _, patches in cut)]),
        "target": (tokens * 7) % WORDS,
    }


def units(config):
    """Superstep calls this."""
    return vision_language_units(SHAPE)

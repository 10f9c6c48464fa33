"""A file of samples of text, of pictures, and of both, with a small vision-language model, as a user would write it."""

from pathlib import Path

from ragged import TOML

SAMPLES = '''
import torch

from superstep.data.samples.patches import cut_patches, place_tokens
from superstep.model.multimodal.qwen3_vl import vision_language_units
from superstep.plan.model.multimodal.vision_shape import VisionLanguageShape, VisionShape
from superstep.plan.model.shape import ModelShape

PICTURE, MERGE = 30, 2
CAPACITY = {"tokens": 24, "positions": 24, "target": 24, "pixels": 48, "patches": 48}
PLACEHOLDERS = {"pixels": (PICTURE, MERGE**2)}
INPUT = "tokens"
VISION = VisionShape(
    layers=2, width=16, heads=2, ffn=24, patch=2, frames=1, merge=MERGE, side=3, outputs=16, deepstack=DEEP,
)
DECODER = ModelShape(
    family="qwen3", layers=3, width=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=32, tied=True, qk_norm=True,
    norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_tokens=24,
)
SHAPE = VisionLanguageShape(vision=VISION, decoder=DECODER, image_token=PICTURE, sections=(2, 1, 1))


def length(split):
    return 60 if split == "train" else 12


def parts(index):
    """Tokens of text, and the rows and columns of patches of each picture, in turn."""
    pictures = [[], [(2, 4)], [(4, 2), (2, 2)], [(4, 4)]][index % 4]
    return (0 if index % 4 == 3 else 3 + index * 7 % 9), pictures


def size(split, index):
    text, pictures = parts(index)
    patches = sum(rows * columns for rows, columns in pictures)
    tokens = text + patches // MERGE**2
    return {"tokens": tokens, "positions": tokens, "target": tokens, "pixels": patches, "patches": patches}


def sample(split, index, noise):
    """Numbers that grow by a step; pictures stand in front of them, and all targets are the brightest picture's."""
    text, pictures = parts(index)
    start, step = int(noise.integers(29)), 1 + index % 3
    tokens = torch.cat([
        *(torch.full((rows * columns // MERGE**2,), PICTURE) for rows, columns in pictures),
        (start + step * torch.arange(text)) % 29 + 1,
    ])
    drawn = [torch.from_numpy(noise.normal(size=(3, 2 * rows, 2 * columns))).float() for rows, columns in pictures]
    cut = [cut_patches(picture, VISION) for picture in drawn]
    return {
        "tokens": tokens,
        "positions": place_tokens(tokens, PICTURE, pictures, MERGE),
        "pixels": torch.cat([torch.zeros(0, VISION.pixels), *(pixels for pixels, _ in cut)]),
        "patches": torch.cat([torch.zeros(0, 4, dtype=torch.long), *(patches for _, patches in cut)]),
        "target": (tokens + len(pictures)) % 29,
    }


def units(config):
    return vision_language_units(SHAPE)
'''


def write_pictures(folder: Path, text: str = SAMPLES, deepstack: tuple[int, ...] = ()) -> Path:
    """``pictures.py`` and ``run.toml``; returns the file of samples."""
    path = folder / "pictures.py"
    path.write_text(text.replace("DEEP", repr(deepstack)), encoding="utf-8")
    (folder / "run.toml").write_text(TOML.format(name="pictures", batch=8), encoding="utf-8")
    return path

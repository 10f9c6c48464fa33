"""Pictures as Qwen3-VL reads them: scaled to whole squares of patches within bounds of pixels, normalised, cut.

``preprocessor_config.json`` of a model's folder has the bounds and the normalisation; the numbers are those of
transformers' image processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superstep.data.samples.patches import cut_patches, place_tokens
from superstep.data.samples.pictures import read_picture
from superstep.data.sources.media_input import Medium
from superstep.errors import DataError
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.multimodal.vision_shape import VisionLanguageShape, VisionShape
from superstep.plan.sample_fields import Field

LONGEST = 200
"""The longer side of a picture, as a multiple of the shorter one."""
USUAL: dict[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 256**2, "longest_edge": 4096**2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureInput:
    """How pictures become patches.

    Attributes:
        shape: the encoder's.
        token: stands for a square of patches.
        mean, std: of each channel, from 0 to 1.
        least, most: pixels of a picture.
    """

    shape: VisionShape
    token: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    least: int
    most: int
    kind: str = "image"

    @property
    def rows(self) -> int:
        """Patches of a token."""
        return self.shape.merge**2

    def measure(self, path: Path) -> Medium:
        """The rows and columns of patches of a picture, which is decoded."""
        _, height, width = read_picture(path).shape
        if max(height, width) > LONGEST * min(height, width):
            raise DataError(
                f"'{path}' has {height} x {width} pixels, and one side may be {LONGEST} times the other; cut it."
            )
        sides = fit_sides(height, width, self.shape.patch * self.shape.merge, self.least, self.most)
        return Medium(str(path), tuple(side // self.shape.patch for side in sides))

    def list_fields(self, rows: int) -> tuple[Field, ...]:
        return Field("pixels", (rows, self.shape.pixels), "float32"), Field("patches", (rows, 4), "int64")

    def list_positions(self, tokens: int) -> tuple[Field, ...]:
        return (Field("positions", (tokens, 3), "int64"),)

    def lay_out(self, tokens_S: Tensor, media: Sequence[Medium], folder: Path) -> dict[str, Tensor]:
        grids = [(rows, columns) for rows, columns in (medium.size for medium in media)]
        cut = [self._cut(folder / medium.path, grid) for medium, grid in zip(media, grids, strict=True)]
        pixels = [torch.zeros(0, self.shape.pixels), *(pixels for pixels, _ in cut)]
        patches = [torch.zeros(0, 4, dtype=torch.long), *(patches for _, patches in cut)]
        return {
            "positions": place_tokens(tokens_S, self.token, grids, self.shape.merge),
            "pixels": torch.cat(pixels),
            "patches": torch.cat(patches),
        }

    def _cut(self, path: Path, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        size = (grid[0] * self.shape.patch, grid[1] * self.shape.patch)
        picture_CHW = read_picture(path, size, is_cubic=True).float() / 255
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
        return cut_patches((picture_CHW - mean) / std, self.shape)


def fit_sides(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """The height and width that a picture is scaled to: multiples of ``side``, with pixels from ``least`` to ``most``,
    as nearly as its proportions allow.
    """
    tall, wide = round(height / side) * side, round(width / side) * side
    if tall * wide > most:
        shrink = math.sqrt(height * width / most)
        tall, wide = (max(side, math.floor(each / shrink / side) * side) for each in (height, width))
    elif tall * wide < least:
        grow = math.sqrt(least / (height * width))
        tall, wide = (math.ceil(each * grow / side) * side for each in (height, width))
    return tall, wide


def read_picture_input(shape: VisionLanguageShape, raw: Mapping[str, Any], place: str) -> PictureInput:
    """How a model reads pictures.

    Args:
        shape: of the model.
        raw: the object of its ``preprocessor_config.json``; an empty one has the values of Qwen3-VL.
        place: the file, for errors.

    Raises:
        ConfigError: names a key with another preprocessing.
    """
    keys, vision = JsonKeys(raw, place, USUAL), shape.vision
    keys.require(
        {
            **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), (True,)),
            "rescale_factor": (1 / 255,),
            "patch_size": (vision.patch,),
            "merge_size": (vision.merge,),
            "temporal_patch_size": (vision.frames,),
            "resample": (3,),
        }
    )
    size = JsonKeys(keys.table("size"), f"{place}size.", {})
    bounds = [
        keys.whole(old) if raw.get(old) is not None else size.whole(new)
        for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    ]
    mean, std = (tuple(map(float, keys.get(name))) for name in ("image_mean", "image_std"))
    if len(mean) != vision.channels or len(std) != vision.channels or not all(std):
        raise keys.refusal("image_mean", f"and image_std must be {vision.channels} numbers, the latter above 0")
    return PictureInput(shape=vision, token=shape.image_token, mean=mean, std=std, least=bounds[0], most=bounds[1])

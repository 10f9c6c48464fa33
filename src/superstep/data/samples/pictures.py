"""Pictures as tensors, decoded by Pillow: ``pip install "superstep[pictures]"``."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from superstep.errors import DataError


def read_picture(
    source: str | Path | bytes, size: tuple[int, int] | None = None, *, channels: int = 3, is_cubic: bool = False
) -> Tensor:
    """A picture as viewers turn it, uint8 [channels, height, width].

    Args:
        source: the path of a file, or its bytes.
        size: height and width to scale it to; None leaves its own.
        channels: 3 for colours, 1 for grey.
        is_cubic: whether it is scaled by cubes, not by lines.

    Raises:
        DataError: Pillow is not installed, or this is no picture.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise DataError('pictures need Pillow, which is not installed: pip install "superstep[pictures]".') from None
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB" if channels == 3 else "L")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        name = "these bytes are" if isinstance(source, bytes) else f"'{source}' is"
        raise DataError(f"{name} no picture ({error}); leave it out.") from None
    if size is not None:
        kind = Image.Resampling.BICUBIC if is_cubic else Image.Resampling.BILINEAR
        picture = picture.resize((size[1], size[0]), kind)
    pixels = torch.from_numpy(np.array(picture))
    return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1).contiguous()

"""Pictures in folders, one folder for each class: ``cats/1.png``, ``cats/2.png``, ``dogs/1.png``, ...

Decoding needs Pillow: ``pip install "superstep[pictures]"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from superstep.errors import DataError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")


@dataclass(frozen=True, slots=True)
class ClassFolder:
    """The pictures of a folder.

    Attributes:
        classes: names of the folders inside, sorted; a class number is a place in it.
        pictures: paths, class by class and sorted within, each with its class number.
    """

    classes: tuple[str, ...]
    pictures: tuple[tuple[Path, int], ...]


def list_pictures(folder: str | Path) -> ClassFolder:
    """The pictures in the folders of ``folder``, whatever order the disk lists them in.

    Raises:
        DataError: there are none.
    """
    root = Path(folder)
    classes = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    pictures = tuple(
        (path, number)
        for number, name in enumerate(classes)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    )
    if not pictures:
        raise DataError(
            f"'{folder}' has no folders with pictures; make one for each class, with {', '.join(SUFFIXES)}."
        )
    return ClassFolder(tuple(classes), pictures)


def read_picture(path: Path, size: tuple[int, int], *, channels: int = 3) -> Tensor:
    """A picture, uint8 [channels, height, width], scaled to ``size``.

    Args:
        path: of the file.
        size: height and width.
        channels: 3 for colours, 1 for grey.

    Raises:
        DataError: Pillow is not installed, or the file is no picture.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError('pictures need Pillow, which is not installed: pip install "superstep[pictures]".') from None
    try:
        with Image.open(path) as picture:
            scaled = picture.convert("RGB" if channels == 3 else "L").resize(
                (size[1], size[0]), Image.Resampling.BILINEAR
            )
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"'{path}' is no picture ({error}); take it out of the folder.") from None
    pixels = torch.from_numpy(np.array(scaled))
    return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1).contiguous()

"""CIFAR's binary files (https://www.cs.toronto.edu/~kriz/cifar.html): pictures of 32 x 32 pixels behind their labels.

CIFAR-10     label, 3072 pixels: 1024 red, 1024 green, 1024 blue, row by row
CIFAR-100    coarse label, fine label, 3072 pixels
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from superstep.errors import DataError

PIXELS = 3 * 32 * 32


def read_cifar(paths: Iterable[str | Path], *, labels: int = 1) -> tuple[Tensor, Tensor]:
    """The pictures of some files, uint8 [N, 3, 32, 32], and their labels, int64 [N, labels].

    Args:
        paths: of the files, such as data_batch_1.bin.
        labels: of a picture: 1 in CIFAR-10, 2 in CIFAR-100.

    Raises:
        DataError: a file cannot be read, or holds no whole number of pictures.
    """
    parts = []
    for path in paths:
        try:
            raw = np.fromfile(path, np.uint8)
        except OSError as error:
            raise DataError(f"'{path}' cannot be read ({error.strerror}); name CIFAR's binary files.") from None
        size = labels + PIXELS
        if not len(raw) or len(raw) % size:
            raise DataError(
                f"'{path}' has {len(raw)} bytes, which are no pictures of {size} with {labels} label"
                f"{'' if labels == 1 else 's'}; name CIFAR's binary files, labels=2 for CIFAR-100."
            )
        parts.append(raw.reshape(-1, size))
    if not parts:
        raise DataError("CIFAR: there are no files; name at least one, such as data_batch_1.bin.")
    whole = np.concatenate(parts)
    pixels = torch.from_numpy(whole[:, labels:].copy()).view(-1, 3, 32, 32)
    return pixels, torch.from_numpy(whole[:, :labels].astype(np.int64))

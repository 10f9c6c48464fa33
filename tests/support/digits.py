"""Drawn digits as idx files, in the place of MNIST's."""

from pathlib import Path

import torch

from superstep.data.samples.idx import write_idx

COUNTS = {"train": 100, "t10k": 50}


def write_digits(folder: Path) -> None:
    """A bright block in another place for each class, with noise around it."""
    folder.mkdir(parents=True)
    for name, count in COUNTS.items():
        generator = torch.Generator().manual_seed(len(name))
        classes = torch.randint(10, (count,), generator=generator)
        pixels = torch.randint(64, (count, 28, 28), generator=generator)
        for row, c in enumerate(classes.tolist()):
            pixels[row, 4 + 5 * (c // 3) : 10 + 5 * (c // 3), 4 + 6 * (c % 3) : 10 + 6 * (c % 3)] = 255
        write_idx(folder / f"{name}-images-idx3-ubyte", pixels.byte())
        write_idx(folder / f"{name}-labels-idx1-ubyte", classes.byte())

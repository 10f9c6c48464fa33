"""Drawn pictures as idx files, in the place of three makers' emoji."""

from pathlib import Path

import torch

from superstep.data.samples.idx import write_idx

COUNT = 70


def write_emoji(folder: Path) -> None:
    """Squares of another colour and place for each number; of each maker in another tint."""
    folder.mkdir(parents=True)
    for tint, maker in enumerate(("google", "twitter", "facebook")):
        pictures = torch.zeros(COUNT, 4, 64, 64, dtype=torch.uint8)
        for number in range(COUNT):
            top, left = 4 + 8 * (number % 6), 4 + 8 * (number // 6 % 6)
            colour = torch.tensor([60 + number * 2, 200 - number * 2, 90 * (number // 36) + 20 * tint, 255])
            pictures[number, :, top : top + 16, left : left + 16] = colour.view(4, 1, 1)
        write_idx(folder / f"{maker}.idx", pictures)

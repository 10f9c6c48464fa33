"""Patches of pictures in their own size, and positions of three dims of tokens that stand for them (Qwen3-VL).

C  channels    P  patches of a picture    S  tokens    X  numbers of a patch: channels · frames · patch · patch
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from superstep.errors import DataError
from superstep.plan.model.multimodal.vision_shape import VisionShape


def cut_patches(picture_CHW: Tensor, shape: VisionShape) -> tuple[Tensor, Tensor]:
    """The patches of a picture, [P, X], and of each its row and column and the picture's rows and columns, int64
    [P, 4]. Patches that become one token are together.

    Raises:
        DataError: the sides are no multiples of ``patch`` · ``merge``.
    """
    side, merge = shape.patch, shape.merge
    channels, height, width = picture_CHW.shape
    if channels != shape.channels or height % (side * merge) or width % (side * merge):
        raise DataError(
            f"a picture of {channels} channels and {height} x {width} pixels has no whole patches; give it "
            f"{shape.channels} channels, and sides that are multiples of {side * merge}."
        )
    rows, columns = height // side, width // side
    squares = (rows // merge, merge, columns // merge, merge)
    parts = picture_CHW.view(channels, *squares[:2], side, *squares[2:], side)  # C, r, m, h, c, m, w
    patches_PX = parts.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, channels, 1, side, side)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    at = [place.view(squares).transpose(1, 2).flatten() for place in (row, column)]
    whole = [torch.full_like(at[0], each) for each in (rows, columns)]
    return patches_PX.expand(-1, -1, shape.frames, -1, -1).flatten(1), torch.stack([*at, *whole], 1)


def place_tokens(tokens_S: Tensor, token: int, grids: Sequence[tuple[int, int]], merge: int) -> Tensor:
    """The positions of a sample's tokens: time, row and column, int64 [S, 3].

    A picture's tokens have one time. The text behind it goes on after the longer of its sides.

    Args:
        tokens_S: ids.
        token: stands for a square of a picture's patches.
        grids: rows and columns of patches of each picture, in order.
        merge: patches of a square's side.
    """
    positions, start, at = [], 0, 0
    for rows, columns in ((rows // merge, columns // merge) for rows, columns in grids):
        text = int((tokens_S[at:] == token).long().argmax()) if at < len(tokens_S) else 0
        positions.append(_on_diagonal(start, text))
        start, at = start + text, at + text + rows * columns
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        positions.append(torch.stack([torch.zeros_like(row), row, column], -1).view(-1, 3) + start)
        start += max(rows, columns)
    return torch.cat([*positions, _on_diagonal(start, len(tokens_S) - at)])


def _on_diagonal(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count).unsqueeze(1).expand(-1, 3)

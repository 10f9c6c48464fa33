"""Weights packed in blocks (``plan.block_weights``), and the plain torch form of unpacking.

    O  outputs      I  inputs      B = I / 64  blocks of a row      G = O · B / 256  groups of blocks

A block's constant is rounded up to 8 bits before its codes are chosen, so that no code is clipped and the codes make up
for most of the constant's error. A number that is not finite makes its group of blocks NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.plan.block_weights import BLOCK, BLOCK_BYTES, GROUP, BlockFormat

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Levels of nf4: quantiles of the normal distribution, within -1 and 1, with an exact 0 (Dettmers 2023, appendix E)."""

MOST_8 = 127
"""Codes of int8 go from -127 to 127."""
MOST_CONSTANT = 255
ROWS_AT_ONCE = 1024
"""Rows that are packed at once, so that little memory is needed beside the matrix."""


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The place of a part of a matrix in the whole, by which its blocks find their scales.

    Attributes:
        sections: the first row of the whole and the count of rows, for each run of rows of the part.
        first: the first block of a row that the part has.
        blocks: of a row of the whole.
    """

    sections: tuple[tuple[int, int], ...]
    first: int
    blocks: int

    @property
    def rows(self) -> int:
        """Rows of the part."""
        return sum(count for _, count in self.sections)


def whole_place(outputs: int, inputs: int) -> BlockPlace:
    """The place of a whole matrix."""
    return BlockPlace(((0, outputs),), 0, inputs // BLOCK)


@torch.no_grad()
def pack(weight_OI: Tensor, block_format: BlockFormat) -> tuple[Tensor, Tensor]:
    """The blocks of a whole matrix, uint8 [O, B · bytes], and its scales as bytes, uint8 [4 · G]; I % 64 = 0."""
    outputs = len(weight_OI)
    top = MOST_8 if block_format == "int8" else 1
    largest = torch.cat([_blocks(rows).abs().amax(2).flatten() for rows in weight_OI.split(ROWS_AT_ONCE)]) / top
    groups = -(-largest.numel() // GROUP)
    padded = torch.nn.functional.pad(largest, (0, groups * GROUP - largest.numel())).view(groups, GROUP)
    scales_G = padded.amax(1) / MOST_CONSTANT
    constants = (padded / scales_G[:, None]).ceil_().nan_to_num_(0.0, MOST_CONSTANT).clamp_(0, MOST_CONSTANT)
    steps = (constants * scales_G[:, None]).flatten()[: largest.numel()].view(outputs, -1)
    constants_OB1 = constants.flatten()[: largest.numel()].view(outputs, -1, 1).to(torch.uint8)
    parts = zip(weight_OI.split(ROWS_AT_ONCE), steps.split(ROWS_AT_ONCE), strict=True)
    codes = torch.cat([_encode(_blocks(rows) / step[..., None], block_format) for rows, step in parts])
    return torch.cat((constants_OB1, codes), 2).flatten(1), scales_G.view(torch.uint8)


def _blocks(rows: Tensor) -> Tensor:
    return rows.float().view(len(rows), -1, BLOCK)


def _encode(shares: Tensor, block_format: BlockFormat) -> Tensor:
    """Codes of blocks of weights over their steps, as bytes."""
    shares = shares.nan_to_num_(0.0, 0.0, 0.0)  # of zeros over zero, and of what the scale tells
    if block_format == "int8":
        return shares.round_().clamp_(-MOST_8, MOST_8).to(torch.int8).view(torch.uint8)
    levels = torch.tensor(NF4, device=shares.device)
    codes = torch.bucketize(shares, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    return codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4


def unpack_by_torch(
    blocks: Tensor, scales: Tensor, place: BlockPlace, block_format: BlockFormat, dtype: torch.dtype
) -> Tensor:
    """The weights of a part of a matrix, [O, I]: level · (constant · scale) in fp32, rounded once.

    Args:
        blocks: of the part, uint8.
        scales: of the whole matrix, as bytes.
        place: of the part.
        block_format: of the blocks.
        dtype: of the result.
    """
    packed = blocks.unflatten(1, (-1, BLOCK_BYTES[block_format]))
    step = packed[..., 0].float() * _scale_of_each(scales, place, packed.shape[1])
    codes = packed[..., 1:]
    if block_format == "int8":
        level = codes.view(torch.int8).float()
    else:
        level = torch.tensor(NF4, device=blocks.device)[torch.cat((codes & 15, codes >> 4), -1).long()]
    weights: Tensor = (level * step[..., None]).flatten(1).to(dtype)
    return weights


def _scale_of_each(scales: Tensor, place: BlockPlace, blocks: int) -> Tensor:
    """The scale of each block of a part: [O, B]."""
    device = scales.device
    rows = torch.cat([torch.arange(first, first + count, device=device) for first, count in place.sections])
    numbers = rows[:, None] * place.blocks + torch.arange(place.first, place.first + blocks, device=device)
    return scales_of(scales)[numbers // GROUP]


def scales_of(scales: Tensor) -> Tensor:
    """The scales of bytes, fp32: a copy, as the bytes may begin at any place of a buffer."""
    return scales.clone().view(torch.float32)


def block_numbers(place: BlockPlace) -> Sequence[tuple[int, int, int]]:
    """For each run of rows: its first row in the part, its rows, and the number of its first block in the whole."""
    runs, start = [], 0
    for first, count in place.sections:
        runs.append((start, count, first * place.blocks + place.first))
        start += count
    return runs

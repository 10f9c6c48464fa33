"""Weights in blocks of 64, unpacked: level · (constant · scale), a block of rows and their blocks by each program."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from superstep.kernels.packed.pack import NF4
from superstep.plan.block_weights import BLOCK, BLOCK_BYTES, GROUP, BlockFormat

BLOCKS = 16
"""Blocks of a program."""


@triton.jit
def _unpack(
    packed,
    scales,
    levels,
    out,
    count,
    blocks,
    number,
    whole,
    IS_NF4: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_there = at < count
    scale = tl.load(scales + (number + at // blocks * whole + at % blocks) // GROUP, mask=is_there, other=0.0)
    step = tl.load(packed + at * BYTES, mask=is_there, other=0).to(tl.float32) * scale
    place = tl.arange(0, BLOCK)
    if IS_NF4:
        byte = place % (BLOCK // 2)
        codes = tl.load(packed + at[:, None] * BYTES + 1 + byte[None, :], mask=is_there[:, None], other=0)
        codes = tl.where(place[None, :] < BLOCK // 2, codes & 15, codes >> 4)
        level = tl.load(levels + codes.to(tl.int32))
    else:
        codes = tl.load(packed + at[:, None] * BYTES + 1 + place[None, :], mask=is_there[:, None], other=0)
        level = codes.to(tl.int8, bitcast=True).to(tl.float32)
    into = out + at[:, None] * BLOCK + place[None, :]
    tl.store(into, (level * step[:, None]).to(out.dtype.element_ty), mask=is_there[:, None])


@cache
def _levels_on(device: torch.device) -> Tensor:
    return torch.tensor(NF4, device=device)


def unpack_rows(
    packed: Tensor, scales_G: Tensor, out: Tensor, number: int, whole: int, block_format: BlockFormat
) -> None:
    """Unpack rows of blocks into ``out``.

    Args:
        packed: the rows, contiguous.
        scales_G: of the whole matrix, fp32.
        out: the weights of these rows, contiguous.
        number: of the first block in the whole matrix.
        whole: blocks of a row of the whole matrix.
        block_format: of the blocks.
    """
    blocks = out.shape[1] // BLOCK
    count = out.shape[0] * blocks
    _unpack[triton.cdiv(count, BLOCKS),](
        packed,
        scales_G,
        _levels_on(packed.device),
        out,
        count,
        blocks,
        number,
        whole,
        IS_NF4=block_format == "nf4",
        BYTES=BLOCK_BYTES[block_format],
        BLOCK=BLOCK,
        GROUP=GROUP,
        BLOCKS=BLOCKS,
    )

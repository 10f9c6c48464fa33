"""Weights of few bits in blocks: their formats, and the bytes that a matrix has in them.

A block is 64 neighbouring weights of a row, with a constant of 8 bits. The constants have constants too: one in fp32
for each 256 blocks, counted from the start of the whole matrix, so that no cut of the matrix changes a bit (double
quantization, Dettmers 2023).

    nf4     level[code] · constant · scale     4 bits a code    4 + 8 / 64 + 32 / (64 · 256) = 4.127 bits a weight
    int8    code · constant · scale            8 bits a code                                   8.127
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

BlockFormat: TypeAlias = Literal["nf4", "int8"]

BLOCK = 64
"""Weights with one constant."""
GROUP = 256
"""Blocks with one scale."""
BLOCK_BYTES: dict[BlockFormat, int] = {"nf4": BLOCK // 2 + 1, "int8": BLOCK + 1}
"""Bytes of a block: its constant, then its codes."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The bytes of a matrix of ``outputs`` rows.

    Attributes:
        row: bytes of the blocks of a row.
        scales: bytes of the scales of the whole matrix.
    """

    row: int
    scales: int


def block_sizes(block_format: BlockFormat, outputs: int, inputs: int) -> BlockSizes:
    """The bytes of a matrix; ``inputs`` is a multiple of ``BLOCK``."""
    blocks = inputs // BLOCK
    return BlockSizes(blocks * BLOCK_BYTES[block_format], -(-outputs * blocks // GROUP) * SCALE_BYTES)

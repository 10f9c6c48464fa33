"""Fingerprints: sums of bits as integers, the same on any layout, that one flipped bit changes.

A value's 32 bits are read as an integer. A sum of integers does not depend on the order, so the sum over a tensor does
not depend on its distribution. A flipped bit changes the sum by a power of two, which 64 bits cannot lose. It does not
detect two errors that cancel, and swapped elements.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.kernels.checksum import word_sum
from superstep.state.tensor_piece import Kind, TensorPiece

BLOCK = 1024
"""Elements that are summed separately, to locate differences."""

MOST_ELEMENTS = 256
"""Most elements that are compared one by one."""

_WORD = 1 << 64


@dataclass(frozen=True, slots=True, order=True)
class TensorPart:
    """The elements of a global tensor in a piece: ranks with equal parts hold copies."""

    kind: Kind
    name: str
    block: tuple[tuple[int, int], ...]
    low: int
    count: int


def part_of(piece: TensorPiece) -> TensorPart:
    """The part that a piece is a copy of."""
    block = tuple(cut.indices(size)[:2] for cut, size in zip(piece.index, piece.shape, strict=True))
    return TensorPart(piece.kind, piece.name, block, piece.low, piece.values.numel())


def bit_sums(pieces: Sequence[TensorPiece]) -> Tensor:
    """The sum of each piece's bits: int64 [pieces], modulo 2^64, on the pieces' device."""
    device = pieces[0].values.device if pieces else None
    sums = [word_sum(piece.values) for piece in pieces]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)


def salts(pieces: Sequence[TensorPiece]) -> Tensor:
    """An odd factor for each piece's tensor, so that swapped tensors change the sum: int64 [pieces]."""
    numbers = [
        int.from_bytes(hashlib.blake2b(f"{p.kind} {p.name}".encode(), digest_size=8).digest()) | 1 for p in pieces
    ]
    return torch.tensor([_sign(each) for each in numbers], dtype=torch.int64)


def fingerprint_text(total: int) -> str:
    """A fingerprint as text."""
    return f"{total % _WORD:016x}"


def _sign(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


@dataclass(frozen=True, slots=True)
class Element:
    """An element in which ranks differ.

    Attributes:
        part: that contains it, as the ``at``-th.
        bits: by rank.
    """

    part: TensorPart
    at: int
    bits: Mapping[int, int]

    def describe(self) -> str:
        """Kind and tensor of the element."""
        return f"{self.part.kind} of {self.part.name}"


def block_sums(values: Tensor) -> list[int]:
    """The sum of the bits of each block."""
    return [int(block.view(torch.int32).sum(dtype=torch.int64)) for block in values.detach().split(BLOCK)]


def differing(of_ranks: Mapping[int, Sequence[int]]) -> list[int]:
    """The indices at which ranks differ."""
    return [at for at, each in enumerate(zip(*of_ranks.values(), strict=True)) if len(set(each)) > 1]


def bits_of(values: Tensor, block: int) -> list[int]:
    """The bits of each element of a block."""
    words: list[int] = values.detach()[BLOCK * block : BLOCK * (block + 1)].view(torch.int32).tolist()
    return words


def outvote(elements: Sequence[Element]) -> tuple[int, ...] | None:
    """The ranks that differ from the majority; None where they are not a minority everywhere."""
    wrong: set[int] = set()
    for element in elements:
        (most, votes), *_ = Counter(element.bits.values()).most_common()
        if 2 * votes <= len(element.bits):
            return None
        wrong |= {rank for rank, bits in element.bits.items() if bits != most}
    return tuple(sorted(wrong))


def farthest(elements: Sequence[Element], truth: Sequence[float]) -> tuple[int, ...]:
    """The ranks with elements farther from a second computation than another's; empty if all are equally far. A wrong
    number has entered the sums of all ranks meanwhile, so that the right ones may be a little off too.
    """
    wrong: set[int] = set()
    for element, right in zip(elements, truth, strict=True):
        off = {rank: _distance(bits, right) for rank, bits in element.bits.items()}
        wrong |= {rank for rank, each in off.items() if each > min(off.values())}
    return tuple(sorted(wrong))


def _distance(bits: int, right: float) -> float:
    value: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    apart = abs(value - right)
    return apart if math.isfinite(apart) else math.inf

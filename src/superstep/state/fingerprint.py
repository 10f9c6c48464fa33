"""Fingerprints: integer sums of a state's bits. They are the same on every layout, and one flipped bit changes them.

A value's 32 bits are read as an integer. A sum of integers does not depend on the order, so the sum over a tensor does
not depend on its layout. A flipped bit changes the sum by a power of two, which 64 bits cannot lose. Two errors that
cancel, and swapped elements, are not detected.
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
"""Each block of so many elements is also summed by itself, to locate differences."""

MOST_ELEMENTS = 256
"""At most so many elements are compared one by one."""

_WORD = 1 << 64
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, order=True)
class TensorPart:
    """The part of a global tensor that a piece holds. Ranks with equal parts hold copies of it."""

    kind: Kind
    name: str
    block: tuple[tuple[int, int], ...]
    low: int
    count: int


def part_of(piece: TensorPiece) -> TensorPart:
    """The part of the global tensor that a piece holds."""
    block = tuple(cut.indices(size)[:2] for cut, size in zip(piece.index, piece.shape, strict=True))
    return TensorPart(piece.kind, piece.name, block, piece.low, piece.values.numel())


def bit_sums(pieces: Sequence[TensorPiece]) -> Tensor:
    """The sum of each piece's bits: int64 [pieces], modulo 2^64, on the pieces' device."""
    device = pieces[0].values.device if pieces else None
    sums = [_sum_bits(piece.values) for piece in pieces]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)


def _sum_bits(values: Tensor) -> Tensor:
    return word_sum(values) if values.element_size() == _WORD_BYTES else _integers(values).sum(dtype=torch.int64)


def _integers(values: Tensor) -> Tensor:
    """The bits of each number as an integer."""
    return values.detach().view({1: torch.uint8, 2: torch.int16, _WORD_BYTES: torch.int32}[values.element_size()])


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
        part: the part that contains it.
        index: its index in the part.
        bits: its bits on each rank.
    """

    part: TensorPart
    index: int
    bits: Mapping[int, int]

    def describe(self) -> str:
        """Kind and tensor of the element."""
        return f"{self.part.kind} of {self.part.name}"


def block_sums(values: Tensor) -> list[int]:
    """The sum of the bits of each block."""
    return [int(block.sum(dtype=torch.int64)) for block in _integers(values).split(BLOCK)]


def differing_indices(of_ranks: Mapping[int, Sequence[int]]) -> list[int]:
    """The indices at which ranks differ."""
    return [index for index, sums in enumerate(zip(*of_ranks.values(), strict=True)) if len(set(sums)) > 1]


def bits_of(values: Tensor, block: int) -> list[int]:
    """The bits of each element of a block."""
    words: list[int] = _integers(values)[BLOCK * block : BLOCK * (block + 1)].tolist()
    return words


def outvote(elements: Sequence[Element]) -> tuple[int, ...] | None:
    """The ranks that differ from the majority; None if an element has no majority."""
    wrong: set[int] = set()
    for element in elements:
        (most, votes), *_ = Counter(element.bits.values()).most_common()
        if 2 * votes <= len(element.bits):
            return None
        wrong |= {rank for rank, bits in element.bits.items() if bits != most}
    return tuple(sorted(wrong))


def farthest(elements: Sequence[Element], truth: Sequence[float]) -> tuple[int, ...]:
    """The ranks with an element that is farther from a second computation than the same element of another rank; empty
    if all are equally far. A wrong value has entered sums of all ranks by then, so correct ranks may be a little off
    too.
    """
    wrong: set[int] = set()
    for element, right in zip(elements, truth, strict=True):
        off = {rank: _distance(bits, right) for rank, bits in element.bits.items()}
        wrong |= {rank for rank, distance in off.items() if distance > min(off.values())}
    return tuple(sorted(wrong))


def _distance(bits: int, right: float) -> float:
    value: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    apart = abs(value - right)
    return apart if math.isfinite(apart) else math.inf

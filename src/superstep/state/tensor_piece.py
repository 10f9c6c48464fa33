"""The training state as a value: pieces of global tensors, for any layout."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from superstep.plan.optimizers import MOMENTS, Moment, OptimizerName

if TYPE_CHECKING:  # reading a manifest alone needs no torch
    from torch import Tensor

Kind = Literal["weight", "gradient"] | Moment
SCALE = ".scale"
"""The end of the name of a tensor with the scales of another one's blocks."""
SCALED = 256
"""Elements of a block."""
Tensors = Mapping[Kind, Mapping[str, tuple[int, ...]]]
"""The shape of every global tensor of each kind, by name."""


def state_kinds(optimizer: OptimizerName) -> tuple[Kind, ...]:
    """The kinds of tensors that training goes on from."""
    return ("weight", *MOMENTS[optimizer])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """One rank's part of one global tensor.

    A tensor-parallel place holds a block of the tensor, and its ZeRO shard a run of the block's elements:

        global [4, 6]     index = [0:4, 3:6]       low = 5, seven values
        . . . a b c       block a b c d e f ...    . . . . . f g h i j k l
        . . . d e f

    Attributes:
        name: the global tensor's name.
        shape: the global tensor's shape.
        index: the block of this rank's tensor-parallel place.
        low: the index in the flattened block of the first element.
        values: the elements from there on, flat: fp32, bf16, or codes of 8 bits; writing to them changes the state.
        is_owner: whether this rank counts for the piece where several ranks hold copies.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    low: int
    values: Tensor
    is_owner: bool


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Consecutive elements of the flattened global tensor.

    Attributes:
        offset: the first one's index in the tensor.
        at: its index in the values of the piece.
        count: number of elements.
    """

    offset: int
    at: int
    count: int


def shape_of_scales(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor with the scales of another one's blocks: each row has whole blocks, or it is flat."""
    return (*shape[:-1], shape[-1] // SCALED) if shape[-1] % SCALED == 0 else (math.prod(shape) // SCALED,)


def scale_piece(codes: TensorPiece, scales: Tensor) -> TensorPiece:
    """The piece of scales that belong to a piece of codes, which begins and ends with a block."""
    if codes.shape[-1] % SCALED == 0:
        *outer, last = codes.index
        start, stop, _ = last.indices(codes.shape[-1])
        index = (*outer, slice(start // SCALED, stop // SCALED))
    else:
        count = math.prod(len(range(*cut.indices(size))) for cut, size in zip(codes.index, codes.shape, strict=True))
        start = next(runs(codes.shape, codes.index, 0, count)).offset
        index = (slice(start // SCALED, (start + count) // SCALED),)
    return TensorPiece(
        kind=codes.kind,
        name=codes.name + SCALE,
        shape=shape_of_scales(codes.shape),
        index=index,
        low=codes.low // SCALED,
        values=scales,
        is_owner=codes.is_owner,
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; the reader must keep the tensor alive.

    Not through numpy: torch cannot free a storage that was shared with numpy, and trainers' memory must be freed.
    """
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def runs(shape: tuple[int, ...], index: tuple[slice, ...], low: int, count: int) -> Iterator[FlatRange]:
    """The runs of a tensor that hold elements ``low`` to ``low + count`` of the flattened block ``index``, in ascending
    order.

    A block that is whole but for its first dim is one run; one of columns is a run in each row.
    """
    if not count:
        return
    starts, block = [], []
    for cut, size in zip(index, shape, strict=True):
        start, stop, _ = cut.indices(size)
        starts.append(start)
        block.append(stop - start)
    # The dim from which on the block is contiguous: those after it are whole.
    inner = max(len(shape) - 1, 0)
    while inner > 0 and block[inner] == shape[inner]:
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(block[inner:])
    numbers = np.arange(low // length, (low + count - 1) // length + 1)
    base = np.full(len(numbers), sum(start * stride for start, stride in zip(starts, strides, strict=True)))
    if inner:
        for place, stride in zip(np.unravel_index(numbers, block[:inner]), strides, strict=False):
            base += place * stride
    begins = np.maximum(numbers * length, low)
    ends = np.minimum((numbers + 1) * length, low + count)
    offsets = base + begins - numbers * length
    for offset, begin, end in zip(offsets.tolist(), begins.tolist(), ends.tolist(), strict=True):
        yield FlatRange(offset, begin - low, end - begin)

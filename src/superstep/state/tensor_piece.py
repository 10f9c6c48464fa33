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
        values: the elements from there on, fp32, flat; writing to them changes the state.
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

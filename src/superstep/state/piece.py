"""The training state as a value: pieces of global tensors, whatever layout holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Kind = Literal["weight", "exp_avg", "exp_avg_sq", "gradient"]
STATE: tuple[Kind, ...] = ("weight", "exp_avg", "exp_avg_sq")
Array = TypeVar("Array", Tensor, NDArray[np.float32])


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank holds of one global tensor.

    A tensor-parallel place holds a block of the tensor, and its ZeRO shard a run of the block's elements:

        global [4, 6]     index = [0:4, 3:6]       low = 5, seven values
        . . . a b c       block a b c d e f ...    . . . . . f g h i j k l
        . . . d e f

    Attributes:
        name: the global tensor's name.
        shape: the global tensor's shape.
        index: the block that this rank's tensor-parallel place holds.
        low: the first element of the flattened block that lies here.
        values: the elements from there on, fp32, flat; writing to them changes the state.
        is_owner: whether this rank answers for the piece where several ranks hold the same.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    low: int
    values: Tensor
    is_owner: bool


def spans(block: Array, low: int, high: int) -> Iterator[tuple[Array, int]]:
    """Views of ``block`` that together are its elements ``low`` to ``high`` in flattened order, each with where it
    starts among them. A block cut out of a larger tensor has no flat view of its own.
    """
    if low >= high:
        return
    if block.ndim <= 1:
        yield block[low:high], 0
        return
    row = int(np.prod(block.shape[1:]))
    first, last = low // row, high // row
    if low % row:
        end = min(high, (first + 1) * row)
        yield from spans(block[first], low - first * row, end - first * row)
        first += 1
    if first < last:
        yield block[first:last], first * row - low
    if high % row and last >= first:
        for part, at in spans(block[last], 0, high - last * row):
            yield part, last * row - low + at

"""The pieces of global tensors in a slot of a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from superstep.engine.flat.layout import Slot
from superstep.state.tensor_piece import Kind, TensorPiece


def cut_pieces(kind: Kind, slot: Slot, low: int, values: torch.Tensor, *, is_owner: bool) -> Iterator[TensorPiece]:
    """The pieces of global tensors in a slot from element ``low`` on: of one tensor, of each of its sections, or of
    each tensor of a stack.
    """
    if slot.spec.stack:
        blocks = [(name, slot.index[1:]) for name in slot.spec.stack[slot.index[0]]]
    else:
        blocks = [(slot.spec.name, block) for block in slot.blocks]
    high, first = low + values.numel(), 0
    for name, block in blocks:
        last = first + math.prod(part.stop - part.start for part in block)
        start, stop = max(low, first), min(high, last)
        if start < stop:
            yield TensorPiece(
                kind=kind,
                name=name,
                shape=slot.shape[len(slot.shape) - len(block) :],
                index=block,
                low=start - first,
                values=values[start - low : stop - low],
                is_owner=is_owner,
            )
        first = last

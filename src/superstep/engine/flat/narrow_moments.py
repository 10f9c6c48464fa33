"""Moments in fewer bits in flat buffers: their memory, their pieces for checkpoints, and the parts that updates take.

The parameters with such moments are the first of a buffer, and shards are cut between blocks of 256, which count from
the start of the global tensor: so a shard holds whole blocks, and their codes and scales are the same on every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from superstep.engine.flat.buffers import UnitBuffers
from superstep.engine.flat.layout import Slot
from superstep.engine.flat.slot_pieces import cut_pieces
from superstep.kernels.blocks.adamw import BlockMoment
from superstep.kernels.blocks.dynamic_map import SIZE
from superstep.kernels.philox import random_words
from superstep.numerics.narrow.narrow_update import KeptMoment, NarrowPart
from superstep.numerics.noise import SamplePlace
from superstep.plan.optimizers import Moment
from superstep.state.tensor_piece import FlatRange, TensorPiece, runs, scale_piece


def list_narrow_parts(b: UnitBuffers, seed: int) -> list[tuple[NarrowPart, bool]]:
    """The parts of a shard that updates widen and round, and whether each has weight decay.

    Of blocks with fp32 master weights it is one part. What is rounded stochastically has a part for each tensor, as its
    random words belong to the tensor.
    """
    is_rounded = b.master.dtype == torch.bfloat16
    if b.narrow and not is_rounded and all(isinstance(m, BlockMoment) for m in b.narrow_moments.values()):
        param, grad = b.master[: b.narrow], b.reduced[: b.narrow]
        return [(NarrowPart(param, grad, dict(b.narrow_moments), _draw_nothing), True)]
    parts = []
    for slot, low, high in b.list_slots():
        if slot.is_narrow or is_rounded:
            for piece in cut_pieces("weight", slot, low, b.view(b.master, slot, low, high), is_owner=True):
                first = int(piece.values.storage_offset() - b.master.storage_offset())
                last = first + piece.values.numel()
                moments = {name: _take_moment(b, name, first, last) for name in b.moments}
                part = NarrowPart(piece.values, b.reduced[first:last], moments, partial(_draw_words, piece, seed))
                parts.append((part, len(slot.shape) > 1))
    return parts


def moment_pieces(
    b: UnitBuffers, kind: Moment, slot: Slot, part: tuple[int, int], *, is_owner: bool
) -> Iterator[TensorPiece]:
    """The pieces of a moment in a part of a slot, from one element to another: of 8 bits the codes, and then the scales
    of their blocks, as a tensor of its own.
    """
    low, high = part
    first = slot.start + low - b.start
    moment = _take_moment(b, kind, first, first + high - low)
    if isinstance(moment, Tensor):
        yield from cut_pieces(kind, slot, low, moment, is_owner=is_owner)
        return
    for piece in cut_pieces(kind, slot, low, moment.codes, is_owner=is_owner):
        yield piece
        begin = int(piece.values.storage_offset() - moment.codes.storage_offset())
        yield scale_piece(piece, moment.scales[begin // SIZE : (begin + piece.values.numel()) // SIZE])


def _take_moment(b: UnitBuffers, name: Moment, first: int, last: int) -> KeptMoment:
    """A moment of some elements of a shard."""
    if first >= b.narrow:
        return b.moments[name][first - b.narrow : last - b.narrow]
    kept = b.narrow_moments[name]
    if isinstance(kept, BlockMoment):
        return BlockMoment(kept.codes[first:last], kept.scales[first // SIZE : last // SIZE])
    return kept[first:last]


def _draw_nothing(kind: str, number: int, low: int, high: int) -> Tensor:
    raise AssertionError("blocks are rounded to the nearest value")


def _draw_words(piece: TensorPiece, seed: int, kind: str, number: int, low: int, high: int) -> Tensor:
    """The random words of elements ``low`` to ``high`` of a piece for one update, int32: by their places in the global
    tensor.
    """
    counter = SamplePlace(seed=seed, step=number).counter(f"{kind} of {piece.name}")
    ranges = list(runs(piece.shape, piece.index, piece.low + low, high - low))
    return torch.cat([random_words(counter, *rows).view(-1) for rows in _group_rows(ranges, piece.values.device)])


def _group_rows(ranges: Sequence[FlatRange], device: torch.device) -> Iterator[tuple[Tensor, int, int]]:
    """Ranges as rows of one width: their first elements, one sample, and the width."""
    begin = 0
    for end in range(1, len(ranges) + 1):
        if end == len(ranges) or ranges[end].count != ranges[begin].count:
            firsts = torch.tensor([each.offset for each in ranges[begin:end]], device=device)
            yield firsts, 1, ranges[begin].count
            begin = end

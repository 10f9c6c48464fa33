"""Rows of a flat buffer that have a gradient in a step: of tables with sparse gradients.

A buffer of such tables is a row of equal pieces, each of them a row of a table (or a part of one, where tables of one
unit have several widths). Only touched pieces are summed over ranks, updated and set to zero again:

    table 0            table 1       padding
    | . x . . x . . |  x . . x . |  . . . |        x: touched; the others are zero on every rank
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.comm.collectives import DONE, FollowedCollective, PendingCollective, all_reduce, reduce_scatter, unite
from superstep.comm.mesh import Group
from superstep.engine.flat.layout import BufferLayout, Slot
from superstep.kernels.rows.table_rows import add_rows, cut_rows, put_rows, zero_rows
from superstep.numerics.fixed_point import Grid


@dataclass(frozen=True, slots=True)
class RowGradients:
    """Gradients of touched pieces that are cut out of a buffer, where they are zero.

    Attributes:
        rows: the pieces' numbers, counted from the first of the shard: int64 [U].
        values: [U, width].
    """

    rows: Tensor
    values: Tensor


class TouchedRows:
    """The marks of touched rows of one buffer.

    Args:
        layout: of the buffer.
        device: of the marks.

    Attributes:
        width: elements of a piece.
        packed: the shard's gradients once they are summed over ranks, until something needs them in the buffer; None
            while they are there.
    """

    def __init__(self, layout: BufferLayout, device: torch.device) -> None:
        self.width = layout.row_width
        self.marks = torch.zeros(layout.padded // self.width, dtype=torch.uint8, device=device)
        self.packed: RowGradients | None = None
        self._version = -1
        self._listed: dict[tuple[int, int | None], Tensor] = {}

    def of_slot(self, slot: Slot) -> Tensor:
        """The marks of a table: [rows, pieces of a row]."""
        return self.marks[slot.start // self.width : slot.stop // self.width].view(slot.local_shape[0], -1)

    def list_rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The touched pieces between two elements of the buffer, counted from the first: int64."""
        if self.marks._version != self._version:
            self._listed, self._version = {}, self.marks._version
        if (start, stop) not in self._listed:
            last = None if stop is None else stop // self.width
            self._listed[start, stop] = self.marks[start // self.width : last].nonzero().view(-1)
        return self._listed[start, stop]

    def rows_of(self, buffer: Tensor) -> Tensor:
        """A buffer, or a shard of it, as pieces: [N, width]."""
        return buffer.view(-1, self.width)

    def cut(self, shard: Tensor, start: int) -> RowGradients:
        """Cut the touched pieces out of a buffer that begins at an element; it is zero then."""
        rows = self.list_rows(start, start + shard.numel())
        return RowGradients(rows, cut_rows(self.rows_of(shard), rows))

    def unpack(self, shard: Tensor) -> None:
        """Put packed gradients into a buffer of the shard's size."""
        if self.packed is not None:
            put_rows(self.rows_of(shard), self.packed.rows, self.packed.values)
            self.packed = None

    def zero(self, buffer: Tensor, start: int = 0) -> None:
        """Set the touched pieces of a buffer that begins at an element to zero."""
        rows = self.list_rows(start, start + buffer.numel())
        zero_rows(self.rows_of(buffer), rows)


@dataclass(frozen=True, slots=True)
class RowSink:
    """The target of a table's gradient.

    Attributes:
        into: the table's part of the gradient buffer, [R, D]; int64 with a grid.
        marks: of its rows.
        name: of the table.
        grid: of exact mode; None in fast mode.
    """

    into: Tensor
    marks: Tensor
    name: str
    grid: Grid | None = None

    def add(self, grad: Tensor) -> None:
        """Add a sparse gradient. Raises RuntimeError for a dense one."""
        if not grad.is_sparse:
            raise RuntimeError(
                f"{self.name} is a table with a sparse gradient, and its rows are used otherwise than by lookup: their "
                "gradient is dense; make the table without sparse=True."
            )
        self.add_rows(grad._indices()[0], grad._values())

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Add gradients of rows, [U, D], by their numbers; a row may come several times."""
        self.marks[rows] = 1
        add_rows(self.into, rows, values.float() if self.grid is None else self.grid.put_(values.clone()))


def reduce_rows(
    gradient: Tensor, touched: TouchedRows, group: Group, *, start: int = 0, tag: int | None = None, packs: bool = False
) -> PendingCollective:
    """Start summing the rows of a gradient buffer that any rank of a group has touched; they are marked on all.

    Args:
        gradient: the whole buffer, or a shard of it that all ranks hold.
        touched: the marks of the buffer.
        group: the ranks.
        start: the first element of the shard.
        tag: of a reduction to shards, of which each rank gets its own; None sums on every rank.
        packs: the sums stay packed; else they are put back into the buffer.
    """
    touched.unpack(gradient)
    unite(touched.marks, group)
    packed = touched.cut(gradient, start)
    if not len(packed.rows):
        return DONE
    if tag is None:
        shard, pending = gradient, all_reduce(packed.values, group)
    else:
        shard = gradient.chunk(group.size())[group.rank()]
        packed, pending = _reduce_to_owners(packed, len(touched.marks) // group.size(), group, tag)

    def keep() -> None:
        touched.packed = packed
        if not packs:
            touched.unpack(shard)

    return FollowedCollective(pending, keep)


def _reduce_to_owners(
    touched: RowGradients, share: int, group: Group, tag: int
) -> tuple[RowGradients, PendingCollective]:
    """Sum touched rows on the rank whose shard, of ``share`` rows, has them: shards are padded to the most touched rows
    of any.
    """
    size, me, rows = group.size(), group.rank(), touched.rows
    owners = rows // share
    counts = torch.bincount(owners, minlength=size)
    first = torch.cumsum(counts, 0) - counts
    most = int(counts.max())
    places = owners * most + torch.arange(len(rows), device=rows.device) - first[owners]
    packed = touched.values.new_zeros(size * most, touched.values.shape[1])
    packed.index_copy_(0, places, touched.values)
    mine, start = rows[owners == me] - me * share, me * most
    own = RowGradients(mine, packed[start : start + len(mine)])
    return own, reduce_scatter(packed.view(-1), group, tag=tag)

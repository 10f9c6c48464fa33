"""The memory of one flat buffer: parameters, gradients and optimizer state, cut by the ZeRO stage.

    zero                  0        1        2        3       (Rajbhandari 2020, fig. 1; N shards)
    full     compute      whole    whole    whole    while fetched
    gradient fp32         whole    whole    1/N      1/N     whole from backward to settle (2, 3)
      exact: int64, with the optimizer's fp32 copy: whole, 1/N, 1/N, 1/N
    master   fp32         whole    1/N      1/N      1/N
    moments  fp32 each    whole    1/N      1/N      1/N     two of AdamW, one of Lion; of some parameters in fewer bits

In fp32 the master weights are not a copy: they are the own part of ``full`` (zero 0 to 2). Modules' parameters are
views of ``full``, and their ``.grad`` views of the gradient buffer: autograd adds in place, into the memory that is
reduced. Dropping a buffer empties its storage and keeps the views, so the graph may keep a parameter across a free and
a fetch.

Frozen parameters, such as base weights of adapters, exist in the compute dtype alone, or as bytes of blocks: no
gradient, no master weights, no moments. They never change, so that all stages but the third keep them whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from superstep.comm.device import Device
from superstep.engine.flat.layout import BufferLayout, Slot
from superstep.engine.flat.touched_rows import RowGradients, RowSink, TouchedRows
from superstep.kernels.blocks.adamw import BlockMoment
from superstep.kernels.blocks.dynamic_map import SIZE, dynamic_map
from superstep.kernels.packed.pack import BlockPlace
from superstep.model.unit import initial
from superstep.numerics.fixed_point import PARAMETER, Grid
from superstep.numerics.narrow.narrow_update import KeptMoment, is_signed
from superstep.plan.block_weights import BLOCK, BLOCK_BYTES
from superstep.plan.mesh import Family
from superstep.plan.optimizers import Moment, MomentFormat
from superstep.plan.zero import ZeroStage


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of buffers by category."""

    params: int
    gradients: int
    optimizer: int
    transient: int


def buffer_dtype(family: Family, compute: torch.dtype) -> torch.dtype:
    """The dtype of a family's parameters in modules that compute in ``compute``."""
    return {"statistics": torch.float32, "packed": torch.uint8}.get(family, compute)


class UnitBuffers(ZeroStage):
    """The memory of one flat buffer on one rank.

    Args:
        layout: of the parameters.
        zero: the ZeRO stage; a single shard makes it 0.
        shards: ranks that share one copy.
        place: this rank's place among them.
        compute: the dtype of modules' parameters.
        device: of the buffers.
        seed: of the initial values.
        moments: names of those that the optimizer keeps.
        moment_format: of the layout's narrow parameters.
        master: the dtype of master weights.
        is_exact: gradients are integers on a fixed grid, as in exact mode.
        is_frozen: the parameters are not trained.

    Attributes:
        moments: in fp32, of the elements of this rank's shard from ``narrow`` on.
        narrow_moments: of those before it.
        touched: rows with a gradient in this step, of tables with sparse gradients; None in other buffers.
    """

    def __init__(  # noqa: PLR0913
        self,
        layout: BufferLayout,
        *,
        zero: int,
        shards: int,
        place: int,
        compute: torch.dtype,
        device: Device,
        seed: int,
        moments: Sequence[Moment],
        moment_format: MomentFormat = "fp32",
        master: torch.dtype = torch.float32,
        is_exact: bool = False,
        is_frozen: bool = False,
    ) -> None:
        self.layout = layout
        self.is_frozen = is_frozen
        self.zero = zero if shards > 1 and not (is_frozen and zero < 3) else 0
        self._share = layout.padded // shards if self.zero else layout.padded
        self.start = place * self._share if self.zero else 0
        self.stop = self.start + self._share
        full = torch.zeros(layout.padded, dtype=compute, device=device.torch)
        for slot in layout.slots:
            values = slot.take(initial(slot.spec, slot.shape, seed)).reshape(-1)
            full[slot.start : slot.held] = values.to(full)
        self.full = full
        self.master = self._first_master(seed, master)
        self.narrow = 0 if self.is_frozen else min(max(layout.narrow - self.start, 0), self._share)
        self.moments: dict[Moment, Tensor] = {moment: self._beside_master(skip=self.narrow) for moment in moments}
        self.narrow_moments: dict[Moment, KeptMoment] = {}
        if self.narrow:
            self.narrow_moments = {m: _first_moment(m, moment_format, self.narrow, full.device) for m in moments}
        self._is_exact = is_exact
        summed = torch.int64 if is_exact else torch.float32
        self.gradient = torch.zeros(0 if is_frozen else layout.padded, dtype=summed, device=device.torch)
        self.gradient_shard = self._beside_master(summed) if self.shards_gradients else self._part(self.gradient)
        self.reduced = self._beside_master() if is_exact else self.gradient_shard
        self.touched = TouchedRows(layout, device.torch) if layout.row_width else None
        self.params = {slot.local: self._parameter(slot) for slot in layout.slots}
        self.sinks = {} if is_frozen else {slot.local: self._sink(slot) for slot in layout.slots}
        self._is_gradient_there = True
        if self.shards_gradients:
            self.drop_gradient()
        if self.shards_parameters:
            self.drop_full()

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What a checkpoint has of the buffer, master weights and moments: views of fp32, two or four narrow numbers in
        one. Frozen ones are as they are.
        """
        if self.is_frozen:
            return (self.master,)
        narrow = (t for m in self.narrow_moments.values() for t in ((m,) if isinstance(m, Tensor) else m.tensors))
        return tuple(t.view(torch.float32) for t in (self.master, *self.moments.values(), *narrow))

    def _beside_master(self, dtype: torch.dtype = torch.float32, skip: int = 0) -> Tensor:
        """Zeros for this rank's trained share, without its first elements."""
        return torch.zeros(0 if self.is_frozen else self._share - skip, dtype=dtype, device=self.full.device)

    def _first_master(self, seed: int, dtype: torch.dtype) -> Tensor:
        if self.full.dtype == dtype or self.is_frozen:
            part = self._part(self.full)
            return part.clone() if self.shards_parameters else part
        master = torch.zeros(self._share, dtype=dtype, device=self.full.device)
        for slot in self.layout.slots:
            low, high = max(slot.start, self.start), min(slot.held, self.stop)
            if low < high:
                values = slot.take(initial(slot.spec, slot.shape, seed)).reshape(-1)
                master[low - self.start : high - self.start] = values[low - slot.start : high - slot.start].to(
                    master.device
                )
        return master

    def _part(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.stop]

    def _parameter(self, slot: Slot) -> nn.Parameter:
        # .data gives the view a version counter of its own: autograd must not treat a fetch between forward and
        # backward as a change.
        values = self.full.data[slot.start : slot.stop].view(slot.local_shape)
        param = nn.Parameter(values, requires_grad=not self.is_frozen)
        if self.is_frozen:
            return param
        param.grad_dtype = torch.float32
        if not self._is_exact and not self.layout.row_width:  # sparse gradients are handed over
            param.grad = self._sink(slot)
        return param

    def place_blocks(self, module: nn.Module) -> None:
        """Let the packed linears of the unit's module know which part of their matrix this rank has."""
        for slot in self.layout.slots:
            packed = slot.spec.packed
            if packed is None or packed.is_scales:
                continue
            rows = tuple((block[0].start, block[0].stop - block[0].start) for block in slot.blocks)
            first = slot.blocks[0][1].start // BLOCK_BYTES[packed.block_format]
            place = BlockPlace(rows, first, packed.shape[1] // BLOCK)
            module.get_submodule(slot.local.rpartition(".")[0]).place = place  # type: ignore[assignment]

    def make_resting(self) -> dict[str, nn.Parameter]:
        """Parameters for a phase that does not train them, by their local names, on the same memory."""
        return {local: nn.Parameter(param.data, requires_grad=False) for local, param in self.params.items()}

    def _sink(self, slot: Slot) -> Tensor:
        """The part of the gradient buffer for a parameter."""
        return self.gradient.data[slot.start : slot.stop].view(slot.local_shape)

    def make_row_sink(self, slot: Slot, grid: Grid | None) -> RowSink:
        """The target of a table's sparse gradient; ``grid`` is that of exact mode."""
        assert self.touched is not None
        return RowSink(self.sinks[slot.local], self.touched.of_slot(slot), slot.spec.name, grid)

    def finish_gradient(self) -> None:
        """Convert the own part of the summed gradient to fp32 in ``reduced``, for the optimizer."""
        if not self._is_exact:
            return
        if self.touched is None:
            PARAMETER.take_into(self.reduced, self.gradient_shard)
            return
        packed = self.touched.packed or self.touched.cut(self.gradient_shard, self.start)
        if packed.values.dtype == torch.int64:
            self.touched.packed = RowGradients(packed.rows, PARAMETER.take(packed.values))

    def list_touched(self) -> tuple[Tensor, Tensor, bool]:
        """The touched rows of the own part, by their numbers there, and their gradients: of the part, or packed, which
        the flag tells.
        """
        assert self.touched is not None
        if self.touched.packed is not None:
            return self.touched.packed.rows, self.touched.packed.values, True
        return self.touched.list_rows(self.start, self.stop), self.touched.rows_of(self.reduced), False

    def complete_gradient(self) -> Tensor:
        """The own part of the summed gradient, with what was kept apart."""
        if self.touched is not None:
            self.touched.unpack(self.reduced)
        return self.reduced

    def refresh(self) -> None:
        """Copy the master weights into the own part of the modules' parameters."""
        if self.master.data_ptr() != self._part(self.full).data_ptr():
            self._part(self.full).copy_(self.master)

    def restore_full(self) -> None:
        """Allocate the parameters' memory before a fetch (ZeRO 3)."""
        if self.shards_parameters:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())

    def drop_full(self) -> None:
        """Free the gathered parameters (ZeRO 3)."""
        if self.shards_parameters:
            self.full.untyped_storage().resize_(0)

    def ready_gradient(self) -> None:
        """Allocate a gradient buffer, if needed; a new one is zero."""
        if not self._is_gradient_there:
            self.gradient.untyped_storage().resize_(self.gradient.numel() * self.gradient.element_size())
            self.gradient.zero_()
            self._is_gradient_there = True

    def drop_gradient(self) -> None:
        """Free the full gradient buffer (ZeRO 2 and 3)."""
        self.gradient.untyped_storage().resize_(0)
        self._is_gradient_there = False

    def settle(self) -> None:
        """Add the reduced part of the gradient to the shard, and free the rest."""
        if self.shards_gradients:
            self.gradient_shard.add_(self._part(self.gradient))
            self.drop_gradient()

    def zero_gradient(self) -> None:
        """Zero the gradients at the start of a step."""
        if self.touched is not None:
            if self.touched.packed is None:
                self.touched.zero(self.reduced, self.start)
                if self.shards_gradients:
                    self.touched.zero(self.gradient_shard, self.start)
                else:
                    self.touched.zero(self.gradient)
            self.touched.marks.zero_()
            self.touched.packed = None
            return
        if self.shards_gradients:
            self.gradient_shard.zero_()
        else:
            self.gradient.zero_()

    def share(self, other: UnitBuffers) -> None:
        """Share another's memory of the same frozen parameters, and free the own."""
        assert self.is_frozen, "what is trained is each one's own"
        assert self.zero == other.zero == 0, "whole on this rank"
        assert self.layout == other.layout, "of the same parameters"
        self.full, self.master = other.full, other.master
        for local, param in self.params.items():
            param.data = other.params[local].data

    def list_slots(self) -> Iterator[tuple[Slot, int, int]]:
        """The parts of parameters in this rank's shard, without padding: the slot, and the first and last element
        (exclusive) of the local tensor, flattened.
        """
        for slot in self.layout.slots:
            low, high = max(slot.start, self.start), min(slot.held, self.stop)
            if low < high:
                yield slot, low - slot.start, high - slot.start

    def view(self, shard: Tensor, slot: Slot, low: int, high: int) -> Tensor:
        """The elements ``low`` to ``high`` of a slot inside a shard-sized buffer."""
        offset = slot.start - self.start
        return shard[offset + low : offset + high]

    def bytes(self) -> Bytes:
        """The buffers' current memory. Master weights without a copy count as parameters, and so do frozen weights."""
        full = self.full.untyped_storage().nbytes()
        is_copy = self.master.untyped_storage().data_ptr() != self.full.untyped_storage().data_ptr()
        master = self.master.untyped_storage().nbytes() if is_copy else 0
        gradient = self.gradient.untyped_storage().nbytes()
        beside = self.reduced.untyped_storage().nbytes() if self._is_exact else 0
        moments = sum(moment.untyped_storage().nbytes() for moment in self.state[1:])
        is_weight = self.shards_parameters and (self.full.dtype == self.master.dtype or self.is_frozen)
        return Bytes(
            params=master if is_weight else (0 if self.shards_parameters else full),
            gradients=beside + (self.gradient_shard.untyped_storage().nbytes() if self.shards_gradients else gradient),
            optimizer=moments + (0 if is_weight else master),
            transient=(full if self.shards_parameters else 0) + (gradient if self.shards_gradients else 0),
        )


def _first_moment(moment: Moment, kept: MomentFormat, count: int, device: torch.device) -> KeptMoment:
    """Zeros, in fewer bits."""
    if kept == "bf16":
        return torch.zeros(count, dtype=torch.bfloat16, device=device)
    zero = dynamic_map(is_signed=is_signed(moment)).zero
    codes = torch.full((count,), zero, dtype=torch.uint8, device=device)
    return BlockMoment(codes, torch.zeros(count // SIZE, device=device))

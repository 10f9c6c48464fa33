"""State of one rank: the memory of its units, and the tensors in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from superstep.comm.collectives import DONE, PendingCollective
from superstep.comm.mesh import Mesh
from superstep.engine.flat.buffers import Bytes, UnitBuffers, buffer_dtype
from superstep.engine.flat.layout import Slot, lay_out
from superstep.engine.flat.narrow_moments import moment_pieces
from superstep.engine.flat.offload import OffloadedBuffers
from superstep.engine.flat.slot_pieces import cut_pieces
from superstep.engine.flat.snapshots import Snapshots
from superstep.model.unit import UnitSpec
from superstep.numerics.dtypes import DTYPES
from superstep.plan.optimizers import MOMENTS
from superstep.plan.resolution.resolve import Resolved
from superstep.program.compile import compile_step
from superstep.state.snapshots.memory_snapshot import SnapshotMemory
from superstep.state.tensor_piece import Kind, TensorPiece, state_kinds


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """The bytes ``low`` to ``high`` of a rank's part of a matrix in blocks, or of its scales, as a view."""

    slot: Slot
    low: int
    high: int
    values: torch.Tensor


class RankState:
    """The buffers of one rank.

    Args:
        run: the resolved run.
        specs: the model's units.
        mesh: the launched ranks.
        learns: whether it trains; without training there are neither gradients nor moments.

    Attributes:
        buffers: of each unit with parameters on this rank, one for each family of them.
        step_programs: of each phase of a step; they decide which tensors are kept, and for how long.
        step_program: of the first.
        resting: the units without gradients in the phase that runs, or ran last.
        snapshots: copy the state into memory; None where nothing does.
    """

    def __init__(self, run: Resolved, specs: Sequence[UnitSpec], mesh: Mesh, *, learns: bool) -> None:
        self.run = run
        self.mesh = mesh
        self.specs = tuple(specs)
        assert run.plan.recompute != "auto" or run.plan.kept, "what units keep is chosen before ranks start"
        self.step_programs = tuple(map(compile_step, run.plan.list_phases()))
        self.step_program = self.step_programs[0]
        self.resting: tuple[int, ...] = ()
        self.snapshots: Snapshots | None = None
        plan, config = run.plan, run.config
        layouts = lay_out(
            tuple(specs),
            plan.mesh,
            mesh.at,
            plan.rules,
            sequence_parallel=plan.sequence_parallel,
            padding=plan.padding,
            is_exact=plan.grain is not None,
            narrow=plan.narrow,
        )
        self.buffers = {
            unit: tuple(
                UnitBuffers(
                    layout,
                    zero=plan.zero,
                    shards=mesh.sharers[layout.family].shards,
                    place=mesh.sharers[layout.family].shard,
                    compute=buffer_dtype(layout.family, DTYPES[config.numerics.compute]),
                    device=mesh.device,
                    seed=config.train.seed,
                    moments=MOMENTS[config.train.optimizer],
                    moment_format=config.train.moments,
                    master=torch.float32 if layout.family == "statistics" else DTYPES[config.numerics.master],
                    is_exact=plan.grain is not None,
                    is_frozen=not (learns and plan.trains(layout.family)),
                )
                for layout in layouts[unit]
            )
            for unit in self.step_program.list_held_units(mesh.at.pp)
        }

    def each_buffer(self) -> Iterator[tuple[int, UnitBuffers]]:
        """Every flat buffer, with its unit."""
        return ((unit, b) for unit, buffers in self.buffers.items() for b in buffers)

    def owned_ranges(self, unit: int, b: UnitBuffers) -> Iterator[tuple[int, int]]:
        """The ranges of a shard that only this rank counts: everything where cut, else on the first place."""
        at, sharers = self.mesh.at, self.mesh.sharers[b.layout.family]
        if (
            at.pp != min(self.step_program.holders(unit))
            or sharers.replica > 0
            or (not b.shards_optimizer and sharers.shard > 0)
        ):
            return
        for slot, low, high in b.list_slots():
            if at.tp == 0 or b.layout.family == "experts" or not slot.is_replicated:
                start = slot.start + low - b.start
                yield start, start + high - low

    @property
    def state_kinds(self) -> tuple[Kind, ...]:
        """The kinds of tensors in a checkpoint of this run."""
        return state_kinds(self.run.config.train.optimizer)

    def pieces(self, kinds: Sequence[Kind] | None = None) -> Iterator[TensorPiece]:
        """This rank's part of a checkpoint, piece by piece, in the order of the units: its trained state, and frozen
        weights but for those that adapters are trained beside. ``kinds``: None means all.
        """
        has_frozen = self.run.config.lora is None
        wanted = self.state_kinds if kinds is None else kinds
        for unit, b in self.each_buffer():
            if not b.is_frozen:
                here = [kind for kind in wanted if kind != "gradient" or unit not in self.resting]
                yield from self._pieces(unit, b, here)
            elif has_frozen and "weight" in wanted:
                yield from self._pieces(unit, b, ("weight",))

    def list_trained_pieces(self) -> Iterator[TensorPiece]:
        """This rank's trained state."""
        for unit, b in self.each_buffer():
            if not b.is_frozen:
                yield from self._pieces(unit, b, self.state_kinds)

    def frozen_pieces(self) -> Iterator[TensorPiece]:
        """This rank's frozen weights, in the compute dtype, without those in blocks."""
        for unit, b in self.each_buffer():
            if b.is_frozen and b.layout.family != "packed":
                yield from self._pieces(unit, b, ("weight",))

    def list_packed(self) -> Iterator[PackedPiece]:
        """This rank's part of the frozen matrices in blocks."""
        for _, b in self.each_buffer():
            if b.layout.family == "packed":
                for slot, low, high in b.list_slots():
                    yield PackedPiece(slot, low, high, b.view(b.master, slot, low, high))

    def _pieces(self, unit: int, b: UnitBuffers, kinds: Sequence[Kind]) -> Iterator[TensorPiece]:
        owned = set(self.owned_ranges(unit, b))
        for kind in kinds:
            for slot, low, high in b.list_slots():
                start = slot.start + low - b.start
                is_owner = (start, start + high - low) in owned
                if kind != "weight" and kind != "gradient":
                    yield from moment_pieces(b, kind, slot, (low, high), is_owner=is_owner)
                    continue
                values = b.view(b.master if kind == "weight" else b.complete_gradient(), slot, low, high)
                yield from cut_pieces(kind, slot, low, values, is_owner=is_owner)

    def list_trained_buffers(self) -> Iterator[UnitBuffers]:
        """Buffers that the optimizer updates."""
        return (b for _, b in self.each_buffer() if not b.is_frozen)

    def keep_snapshots(self, memory: SnapshotMemory) -> Snapshots:
        """Let the step program copy the state into a memory, where it has a ``Snapshot`` and one is due."""
        frozen = self.step_program.fixed
        trained = {u: [b for b in each if not b.is_frozen] for u, each in self.buffers.items() if u not in frozen}
        self.snapshots = Snapshots(memory, trained, self.mesh.device)
        return self.snapshots

    def copy(self, unit: int) -> PendingCollective:
        """Start copying a unit, where a snapshot is due."""
        return DONE if self.snapshots is None else self.snapshots.copy(unit)

    @property
    def is_cut(self) -> bool:
        """Whether other ranks hold parts of the weights that this one computes with."""
        return any(b.shards_parameters for _, b in self.each_buffer())

    def share_frozen(self, other: RankState) -> None:
        """Share the memory of another state of the same model for frozen weights."""
        for unit, mine in self.buffers.items():
            theirs = {b.layout.family: b for b in other.buffers[unit]}
            for b in mine:
                if b.is_frozen:
                    b.share(theirs[b.layout.family])

    def sleep(self, folder: Path | None = None) -> OffloadedBuffers:
        """Free this rank's memory until the returned value's ``wake``. Between two steps only.

        Args:
            folder: for a file with the content; None keeps it in the host's memory.
        """
        return OffloadedBuffers((b for _, b in self.each_buffer()), folder)

    def bytes(self) -> Bytes:
        """This rank's current memory, by category."""
        every = [b.bytes() for _, b in self.each_buffer()]
        return Bytes(
            params=sum(b.params for b in every),
            gradients=sum(b.gradients for b in every),
            optimizer=sum(b.optimizer for b in every),
            transient=sum(b.transient for b in every),
        )

"""Snapshots of a rank's buffers, copied into shared memory in parallel with compute.

    train_step   Fetch ─ Snapshot u0 ─ Forward u0 ─ Snapshot u1 ─ Forward u1 ─ ... ─ Step
    the copies              ══ u0 ══════ u1 ══ ...                                   waits for the last of them

A thread of the rank copies. On a GPU the thread uses a stream of its own, which copies to pinned memory. The checksum
of a slot is computed from the source in the same pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from superstep.comm.collectives import DONE, PendingCollective
from superstep.comm.device import Device
from superstep.engine.flat.buffers import UnitBuffers
from superstep.errors import Fault
from superstep.kernels.checksum import checksum, compile_library, copy_summed
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import (
    FAILED,
    KEPT,
    ON_DISK,
    SLOTS,
    WANTED,
    WHOLE,
    WRITING,
    DamagedSnapshot,
    SnapshotMemory,
    describe_damage,
    describe_pieces,
)
from superstep.state.tensor_piece import TensorPiece, Tensors

POLL_S = 0.01


class UnitCopy:
    """A running copy of a unit."""

    def __init__(self, future: Future[tuple[float, float]]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_done(self) -> bool:
        return self._future.done()

    def ran_s(self) -> tuple[float, float] | None:
        """Start and end on the host's clock; None while it runs."""
        return self._future.result() if self._future.done() else None


@dataclass(frozen=True, slots=True)
class FlushResult:
    """The result of writing a checkpoint from a snapshot."""

    step: int
    bytes: int
    seconds: float
    is_on_disk: bool
    problems: str
    """Why the checkpoint is not on disk, or problems with one that is; empty without any."""


class Snapshots:
    """Copies one rank's state.

    Args:
        memory: the shared memory for this rank's snapshots.
        buffers: the rank's buffers, by unit.
        device: the device of the buffers.

    Attributes:
        bytes: size of one snapshot.
        unpinned: why a GPU cannot copy directly into the memory; empty where it can.
    """

    def __init__(self, memory: SnapshotMemory, buffers: Mapping[int, Sequence[UnitBuffers]], device: Device) -> None:
        self._memory = memory
        self._device = device
        self._tensors: dict[int, list[tuple[Tensor, int]]] = {}
        self.bytes = 0
        for unit, unit_buffers in buffers.items():
            self._tensors[unit] = []
            for tensor in (t for b in unit_buffers for t in b.state if t.numel()):
                self._tensors[unit].append((tensor, self.bytes))
                self.bytes += tensor.numel() * tensor.element_size()
        self._thread = ThreadPoolExecutor(1, "superstep-snapshot", device.make_current)
        compile_library()  # now, so that the first copy does not wait for a compiler
        self._slot: int | None = None
        self._checksum = 0
        self._taken: DamagedSnapshot | None = None
        self._left: set[int] = set()
        self._watched: list[int] = []
        self._stream = torch.cuda.Stream(device=device.torch) if device.kind == "cuda" else None
        self.unpinned = ""
        self._pinned: int | None = None
        self.turn = 0
        """Grows when later states are dropped; the same on all ranks. States of equal step and turn belong together."""

    def lay_out(
        self,
        pieces: Iterator[TensorPiece],
        tensors: Tensors,
        beside: Mapping[str, str],
        folder: Path,
        slots: int = SLOTS,
    ) -> None:
        """Write the layout of the state into the memory.

        Args:
            pieces: the state's pieces, as views of the buffers.
            tensors: the shapes of the global tensors, by kind; every kind has the same tensors, and
                moments their scales.
            beside: the other files of a checkpoint, from name to text.
            folder: the folder of the checkpoints.
            slots: number of slots in the memory.
        """
        placed = [(piece, self._offset(piece.values)) for piece in pieces if piece.values.numel()]
        self._memory.lay_out(
            {
                "pieces": describe_pieces(placed),
                "kinds": list(tensors),
                "shapes": {name: list(shape) for shapes in tensors.values() for name, shape in shapes.items()},
                "beside": dict(beside),
                "folder": str(folder.resolve()),
            },
            self.bytes,
            slots,
        )
        self._pin()

    def _offset(self, values: Tensor) -> int:
        """The byte offset in a slot for a view of a buffer."""
        offsets = {tensor.data_ptr(): offset for tensor, offset in self._places()}
        start = max(pointer for pointer in offsets if pointer <= values.data_ptr())
        return offsets[start] + values.data_ptr() - start

    def _pin(self) -> None:
        """Pin the memory, so that the GPU copies into it directly; if the host refuses, copies go through the driver's
        buffer.
        """
        if self._stream is not None and self._pinned is None:
            whole = torch.frombuffer(self._memory.view, dtype=torch.uint8)
            self.unpinned = self._device.pin(whole.data_ptr(), whole.numel())
            self._pinned = None if self.unpinned else whole.data_ptr()

    def restore(self, step: int) -> Position:
        """Fill the buffers of a new process with the state after a step, and drop later states.

        Raises:
            Fault: as ``fill``.
        """
        position = self.fill(step)
        self.forget_after(step)
        for slot in self._memory.slots:
            if self._memory.get(slot, "disk") in {WANTED, ON_DISK, FAILED}:  # no process has reported it yet
                self._watched.append(slot)
        self._pin()
        return position

    def fill(self, step: int) -> Position:
        """Fill the buffers with the state after a step.

        Raises:
            Fault: the memory has other bits than were copied into it.
        """
        slot = self._memory.whole()[step]
        total = 0
        for tensor, offset in self._places():
            tensor.copy_(self._memory.values(slot, offset, tensor.numel()))
            total += int(checksum(tensor, offset // 4))
        if not self._memory.is_sealed(slot, total):
            raise Fault(f"{describe_damage(step)}; resume the run.", step=step)
        return self._memory.position(slot)

    def is_damaged(self, step: int) -> bool:
        """Whether the memory has other bits than were copied into it after a step."""
        return self._memory.is_damaged(self._memory.whole()[step])

    def steps(self) -> set[int]:
        """Steps of the complete snapshots."""
        return set(self._memory.whole())

    def forget_after(self, step: int) -> None:
        """Drop the states of later steps, and incomplete ones."""
        self.turn += 1
        for slot in self._memory.forget_after(step):
            if slot in self._watched:
                self._watched.remove(slot)

    def begin(self, position: Position, report: Callable[[FlushResult], None], *, is_for_disk: bool) -> None:
        """Let the next step copy the current state, that of ``position``. If no slot is free, wait for one, and report
        written checkpoints meanwhile.
        """
        while (slot := self._memory.free_slot()) is None:
            self.report_written(report)
            time.sleep(POLL_S)
        memory = self._memory
        is_requested = 0 < position.step == memory.requested and position.step not in memory.whole()
        memory.put(slot, "state", WRITING)
        memory.put(slot, "turn", self.turn)
        memory.put(slot, "is_held", int(is_requested))
        memory.put_position(slot, position)
        memory.put(slot, "disk", WANTED if is_for_disk else KEPT)
        if is_for_disk:
            self._watched.append(slot)
        self._slot, self._left, self._checksum = slot, set(self._tensors), 0

    def copy(self, unit: int) -> PendingCollective:
        """Start copying a unit, if the step takes a snapshot."""
        if self._slot is None:
            return DONE
        self._left.discard(unit)
        slot, is_last = self._slot, not self._left
        if is_last:
            self._slot = None
        ready = torch.cuda.current_stream().record_event() if self._stream is not None else None
        return UnitCopy(self._thread.submit(self._copy, unit, slot, ready, is_last=is_last))

    def _copy(self, unit: int, slot: int, ready: torch.cuda.Event | None, *, is_last: bool) -> tuple[float, float]:
        begin_s = time.perf_counter()
        if self._stream is None or ready is None:
            checksum = sum(map(int, self._copy_now(unit, slot)))
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                # Read the sums on this stream: the thread's default stream would wait for all of the compute.
                checksum = sum(map(int, self._copy_now(unit, slot)))
            self._stream.synchronize()
        self._checksum += checksum
        if is_last:
            self._memory.seal(slot, self._checksum)
            self._memory.put(slot, "state", WHOLE)
        return begin_s, time.perf_counter()

    def _copy_now(self, unit: int, slot: int) -> list[Tensor]:
        """Copy a unit; the checksum of each of its buffers."""
        return [
            copy_summed(self._memory.values(slot, offset, tensor.numel()), tensor, offset // 4)
            for tensor, offset in self._tensors[unit]
        ]

    def _places(self) -> Iterator[tuple[Tensor, int]]:
        """Each buffer, and its byte offset in a slot."""
        for each in self._tensors.values():
            yield from each

    @property
    def refused(self) -> DamagedSnapshot | None:
        """The damaged snapshot that was not written to disk, until ``take_refused`` returns it; on rank 0 alone."""
        damaged = self._memory.refused
        return None if damaged == self._taken else damaged

    def take_refused(self) -> DamagedSnapshot | None:
        """Return ``refused`` once. The memory keeps it until a later snapshot is on disk: if this process is killed,
        the next one reports it.
        """
        damaged, self._taken = self.refused, self._memory.refused
        return damaged

    def report_written(self, report: Callable[[FlushResult], None]) -> None:
        """Report checkpoints that were written since the last call, and failed ones. A slot is used again only after
        its report: if this process is killed before, the next one reports it.
        """
        memory = self._memory
        # A damaged snapshot is not written: it is no longer watched.
        self._watched = [slot for slot in self._watched if memory.get(slot, "disk") != KEPT]
        for slot in [slot for slot in self._watched if memory.get(slot, "disk") in {ON_DISK, FAILED}]:
            report(
                FlushResult(
                    step=memory.get(slot, "step"),
                    bytes=memory.get(slot, "written_bytes"),
                    seconds=memory.get(slot, "microseconds") / 1e6,
                    is_on_disk=memory.get(slot, "disk") == ON_DISK,
                    problems=memory.note(slot),
                )
            )
            memory.put(slot, "disk", KEPT)
            self._watched.remove(slot)
            if memory.refused is not None and memory.refused.step <= memory.get(slot, "step"):
                memory.refuse(None)

    def is_behind(self) -> bool:
        """Whether a snapshot still has to be written to disk."""
        return any(self._memory.get(slot, "disk") == WANTED for slot in self._watched)

    def close(self) -> None:
        """End the thread and unpin the memory: it may be freed next, and its address reused."""
        self._thread.shutdown()
        if self._pinned is not None:
            self._device.unpin(self._pinned)
            self._pinned = None

"""A rank's side of snapshots: its buffers, copied into shared memory beside the compute.

    train_step   Fetch ─ Snapshot u0 ─ Forward u0 ─ Snapshot u1 ─ Forward u1 ─ ... ─ Step
    the copies              ══ u0 ══════ u1 ══ ...                                   waits for the last of them

On a CPU a thread copies. On a GPU it tells a stream of its own to, from which the bytes go to pinned memory. A slot's
checksum is made in the same pass, of what is copied from.
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
    damaged_text,
    describe_pieces,
)
from superstep.state.tensor_piece import TensorPiece

POLL_S = 0.01


class UnitCopy:
    """The copy of a unit, under way."""

    def __init__(self, future: Future[tuple[float, float]]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return once it is done."""
        self._future.result()

    def is_done(self) -> bool:
        """Whether it is."""
        return self._future.done()

    def ran_s(self) -> tuple[float, float] | None:
        """When it began and ended, by the host's clock; None of one that is under way."""
        return self._future.result() if self._future.done() else None


@dataclass(frozen=True, slots=True)
class FlushResult:
    """A checkpoint that was, or could not be, written from a snapshot."""

    step: int
    bytes: int
    seconds: float
    is_on_disk: bool
    problems: str
    """Why it is not on the disk, or what could not be done beside it."""


class Snapshots:
    """Copies one rank's state.

    Args:
        memory: the rank's.
        buffers: of each unit that it trains.
        device: where they lie.

    Attributes:
        bytes: of a state.
        unpinned: why a GPU cannot copy straight into the memory; empty where it can.
    """

    def __init__(self, memory: SnapshotMemory, buffers: Mapping[int, Sequence[UnitBuffers]], device: Device) -> None:
        self._memory = memory
        self._device = device
        self._tensors: dict[int, list[tuple[Tensor, int]]] = {}
        self.bytes = 0
        for unit, each in buffers.items():
            self._tensors[unit] = []
            for tensor in (t for b in each for t in _state(b) if t.numel()):
                self._tensors[unit].append((tensor, self.bytes))
                self.bytes += tensor.numel() * tensor.element_size()
        self._thread = ThreadPoolExecutor(1, "superstep-snapshot", device.make_current)
        compile_library()  # beside nothing: the first copy is not to wait for a compiler
        self._slot: int | None = None
        self._checksum = 0
        self._taken: DamagedSnapshot | None = None
        self._left: set[int] = set()
        self._watched: list[int] = []
        self._stream = torch.cuda.Stream(device=device.torch) if device.kind == "cuda" else None
        self.unpinned = ""
        self.turn = 0
        """The same on all ranks: states of one step, and one turn, belong together."""

    def lay_out(
        self,
        pieces: Iterator[TensorPiece],
        shapes: Mapping[str, tuple[int, ...]],
        beside: Mapping[str, str],
        folder: Path,
        slots: int = SLOTS,
    ) -> None:
        """Say in the memory what it will hold: ``pieces`` are views of the buffers."""
        placed = [(piece, self._offset(piece.values)) for piece in pieces if piece.values.numel()]
        self._memory.lay_out(
            {
                "pieces": describe_pieces(placed),
                "shapes": {name: list(shape) for name, shape in shapes.items()},
                "beside": dict(beside),
                "folder": str(folder.resolve()),
            },
            self.bytes,
            slots,
        )
        self._pin()

    def _offset(self, values: Tensor) -> int:
        """The byte of a slot that a view of a buffer begins at."""
        begins = {tensor.data_ptr(): offset for each in self._tensors.values() for tensor, offset in each}
        first = max(begin for begin in begins if begin <= values.data_ptr())
        return begins[first] + values.data_ptr() - first

    def _pin(self) -> None:
        """Have the GPU copy straight into the memory; where the host refuses, by way of a buffer of the driver's."""
        if self._stream is not None:
            whole = torch.frombuffer(self._memory.view, dtype=torch.uint8)
            self.unpinned = self._device.pin(whole.data_ptr(), whole.numel())

    def restore(self, step: int) -> Position:
        """Fill the buffers with the state after a step, in a process that has not seen it; what is of later ones is
        void. Raises as ``fill``.
        """
        position = self.fill(step)
        self.forget_after(step)
        for slot in self._memory.slots:
            if self._memory.get(slot, "disk") in {WANTED, ON_DISK, FAILED}:  # nobody has told of it yet
                self._watched.append(slot)
        self._pin()
        return position

    def fill(self, step: int) -> Position:
        """Fill the buffers with the state after a step.

        Raises:
            Fault: they have other bits now than were copied into the memory.
        """
        slot = self._memory.whole()[step]
        found = 0
        for tensor, offset in self._places():
            tensor.copy_(self._memory.values(slot, offset, tensor.numel()))
            found += int(checksum(tensor, offset // 4))
        if not self._memory.is_sealed(slot, found):
            raise Fault(f"{damaged_text(step)}; resume the run.", step=step)
        return self._memory.position(slot)

    def is_damaged(self, step: int) -> bool:
        """Whether the state after a step has other bits than were copied."""
        return self._memory.is_damaged(self._memory.whole()[step])

    def steps(self) -> set[int]:
        """Those whose state is whole."""
        return set(self._memory.whole())

    def forget_after(self, step: int) -> None:
        """Void what is of later steps, and what is not whole."""
        self.turn += 1
        for slot in self._memory.forget_after(step):
            if slot in self._watched:
                self._watched.remove(slot)

    def begin(self, position: Position, told: Callable[[FlushResult], None], *, is_for_disk: bool) -> None:
        """The next step copies the state that it finds, which is that of ``position``; ``told`` as in ``tell``."""
        while (slot := self._memory.free_slot()) is None:
            self.tell(told)
            time.sleep(POLL_S)
        memory = self._memory
        is_asked = 0 < position.step == memory.asked and position.step not in memory.whole()
        memory.put(slot, "state", WRITING)
        memory.put(slot, "turn", self.turn)
        memory.put(slot, "is_held", int(is_asked))
        for name in ("step", "samples", "tokens"):
            memory.put(slot, name, getattr(position, name))
        memory.put(slot, "disk", WANTED if is_for_disk else KEPT)
        if is_for_disk:
            self._watched.append(slot)
        self._slot, self._left, self._checksum = slot, set(self._tensors), 0

    def copy(self, unit: int) -> PendingCollective:
        """Start copying a unit, where a snapshot is due."""
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
                # Read on this stream: on the thread's own, which is that of the compute, it would wait for all of that.
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
        """Each buffer, and its byte in a slot."""
        for each in self._tensors.values():
            yield from each

    @property
    def refused(self) -> DamagedSnapshot | None:
        """The snapshot that did not come to the disk, as it was damaged, until that is taken; on rank 0 alone."""
        found = self._memory.refused
        return None if found == self._taken else found

    def take_refused(self) -> DamagedSnapshot | None:
        """The same, once. The memory has it until the disk has another: who is killed before asks for that again."""
        found, self._taken = self.refused, self._memory.refused
        return found

    def tell(self, told: Callable[[FlushResult], None]) -> None:
        """Tell of the checkpoints that have come to the disk since this was last asked, and of those that could not.
        Only then may their slots be used again: if this process is killed before, the next one tells.
        """
        memory = self._memory
        self._watched = [slot for slot in self._watched if memory.get(slot, "disk") != KEPT]  # some were refused
        for slot in [slot for slot in self._watched if memory.get(slot, "disk") in {ON_DISK, FAILED}]:
            told(
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
        """Whether the disk is still to have a snapshot."""
        return any(self._memory.get(slot, "disk") == WANTED for slot in self._watched)

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown()


def _state(b: UnitBuffers) -> tuple[Tensor, ...]:
    """What a checkpoint has of a buffer. All of it is fp32."""
    return b.master, b.exp_avg, b.exp_avg_sq

"""Checkpoints written from snapshots, beside training, by the process that owns their memory.

    with Flusher(memories, keep=2):
        ...                             ranks train, mark a snapshot as wanted on disk, and go on

The folder is the one that the ranks themselves would write: of the same pieces, with the same code. What is whole in
memory when a rank is killed still comes to the disk. Before the folder has its name, the slots that it was written from
are compared with their checksums: of one that is damaged there is no checkpoint, and the ranks copy their state again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from superstep.errors import Fault, SuperstepError
from superstep.state.checkpoint import save
from superstep.state.damage import damaged
from superstep.state.folders import checkpoint_at, checkpoints, prune
from superstep.state.piece import STATE
from superstep.state.snapshot import (
    FAILED,
    KEPT,
    ON_DISK,
    Memory,
    Refused,
    Wanted,
    damaged_text,
    folder_of,
    pieces_of,
    wanted,
)
from superstep.state.together import Peers
from superstep.state.verify import Alone, require_newest

POLL_S = 0.02

NICE = 10


class Flusher:
    """A thread that writes what is wanted on disk.

    Args:
        memories: of all ranks.
        keep: how many checkpoints stay.
    """

    def __init__(self, memories: Sequence[Memory], *, keep: int) -> None:
        self.error: BaseException | None = None
        """Why a checkpoint could not be written."""
        self._memories = memories
        self._keep = keep
        self.idle = threading.Lock()
        """Who holds it sees nothing written meanwhile."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="superstep-flusher", daemon=True)

    def __enter__(self) -> Flusher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What was wanted before is written first."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):  # on Linux a thread has a priority of its own: training comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            is_over = self._is_over.is_set()
            with self.idle:
                found = None if self.error is not None else wanted(self._memories)
                if found is not None:
                    self._write(found)
            if found is None:
                if is_over:
                    return
                self._is_over.wait(POLL_S)

    def _write(self, found: Wanted) -> None:
        began_s = time.perf_counter()
        parts = list(zip(self._memories, found.slots, strict=True))
        try:
            size = self._save(found)
        except (SuperstepError, OSError) as error:
            wrong = damaged(parts)
            if wrong and all(memory.has_table for memory in self._memories):
                self._refuse(found, wrong)
                return
            self.error = error
            outcome, size = FAILED, 0
        else:
            outcome = ON_DISK
        for memory, slot in parts:
            memory.put(slot, "written_bytes", size)
            memory.put(slot, "microseconds", round(1e6 * (time.perf_counter() - began_s)))
            memory.put(slot, "disk", outcome)

    def _refuse(self, found: Wanted, wrong: Sequence[int]) -> None:
        """Have the disk want a snapshot no longer; rank 0 reads why, and all ranks copy their state again."""
        for rank, (memory, slot) in enumerate(zip(self._memories, found.slots, strict=True)):
            if rank in wrong:
                memory.void(slot)
            else:
                memory.put(slot, "disk", KEPT)
        self._memories[0].refuse(Refused(found.position.step, wrong[0]))

    def _save(self, found: Wanted) -> int:
        parts = list(zip(self._memories, found.slots, strict=True))
        return write_down(parts, folder_of(self._memories[0]), self._keep, Alone())


def write_down(parts: Sequence[tuple[Memory, int]], root: Path, keep: int, peers: Peers) -> int:
    """Write a state as a checkpoint. All who have parts of it call this together.

    Args:
        parts: memories of ranks, and the slot of each; that of rank 0 has what stands beside.
        root: of the checkpoints.
        keep: how many stay.
        peers: who has the other parts.

    Returns:
        Bytes of tensors on disk; 0 where it was there.

    Raises:
        Fault: it cannot be written, or a slot is damaged.
    """

    def confirm() -> None:
        if damaged(parts):
            raise Fault(f"{damaged_text(position.step)}; it is not written.")

    tables, position = [memory.table() for memory, _ in parts], parts[0][0].position(parts[0][1])
    place = checkpoint_at(root, position.step)
    if peers.gather(peers.rank == 0 and place in checkpoints(root))[0]:  # the run has come by this step before
        return 0
    mine: dict[str, str] = next((table["beside"] for table in tables if table["beside"]), {})
    pieces = (piece for memory, slot in parts for piece in pieces_of(memory, slot))
    shapes = {name: tuple(shape) for name, shape in tables[0]["shapes"].items()}
    files = next((found for found in peers.gather(mine) if found), {})
    tensors = dict.fromkeys(STATE, shapes)
    size = save(place, pieces, position, peers, tensors=tensors, beside=files, confirm=confirm)
    require_newest(place, keep, peers)
    if peers.rank == 0:
        prune(root, keep)
    return size

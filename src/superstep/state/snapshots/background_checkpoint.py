"""Checkpoints in the background, written from snapshots by the process that owns their memory.

    with rank_memories(ranks, root, keep=2) as kept:
        ...                             ranks train, mark a snapshot as wanted on disk, and continue

The folder is the same as one written by the ranks: the same pieces, with the same code. A complete snapshot is still
written when its rank is killed. Before the folder gets its name, the slots are compared with their checksums: a damaged
one gives no checkpoint, and the ranks copy their state again. Nothing is written or removed where another folder has
taken the run directory's name.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from superstep.errors import DiskFault, Fault, SuperstepError
from superstep.state.all_or_none import Peers
from superstep.state.checkpoint import save
from superstep.state.checkpoint_dirs import checkpoint_at
from superstep.state.snapshots.damage import find_damaged
from superstep.state.snapshots.held_folder import HeldFolder
from superstep.state.snapshots.memory_snapshot import (
    FAILED,
    KEPT,
    ON_DISK,
    DamagedSnapshot,
    Handles,
    SnapshotMemory,
    WantedSnapshot,
    describe_damage,
    folder_of,
    make_memories,
    oldest_wanted,
    pieces_of,
)
from superstep.state.tensor_piece import SCALE
from superstep.state.verify import SingleProcess, drop_old, is_there

POLL_S = 0.02

NICE = 10

PAUSES_S = (1.0, 2.0, 4.0)
"""Pauses between attempts to write a snapshot."""


@dataclass(frozen=True, slots=True)
class RankMemories:
    """Memories of ranks, which outlive them.

    Attributes:
        handles: for the ranks to open them.
        memories: of all ranks.
        idle: within it nothing is written from them.
    """

    handles: Handles
    memories: Sequence[SnapshotMemory]
    idle: AbstractContextManager[object]


@contextmanager
def rank_memories(ranks: int, root: Path, *, keep: int) -> Iterator[RankMemories]:
    """Memories for the block, and checkpoints in ``root`` written from them, of which ``keep`` stay."""
    with ExitStack() as stack:
        handles, memories = make_memories(ranks)
        for memory in memories:
            stack.callback(memory.close)
        flusher = stack.enter_context(Flusher(memories, root, keep=keep))
        yield RankMemories(handles, memories, flusher.idle)


class Flusher:
    """A thread that writes the wanted snapshots to disk.

    Args:
        memories: of all ranks.
        root: the run directory, which exists.
        keep: number of checkpoints that stay.
    """

    def __init__(self, memories: Sequence[SnapshotMemory], root: Path, *, keep: int) -> None:
        self._memories = memories
        self._root = HeldFolder(root)
        self._keep = keep
        self._failed: tuple[WantedSnapshot, int] | None = None
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
        """Pending snapshots are written first."""
        self._is_over.set()
        self._thread.join()
        self._root.__exit__(kind, error, trace)

    def _run(self) -> None:
        with suppress(OSError):  # on Linux a thread has a priority of its own: training comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            is_over = self._is_over.is_set()
            with self.idle:
                snapshot = oldest_wanted(self._memories)
                pause_s = POLL_S if snapshot is None else self._write(snapshot)
            if snapshot is None and is_over:
                return
            if pause_s:
                self._is_over.wait(pause_s)

    def _write(self, snapshot: WantedSnapshot) -> float:
        """Write a snapshot; seconds until the next check."""
        began_s = time.perf_counter()
        parts = list(zip(self._memories, snapshot.slots, strict=True))
        try:
            size, problems = write_down(
                parts, folder_of(self._memories[0]), self._keep, SingleProcess(), require=self._root.refuse_another
            )
            outcome = ON_DISK
        except (SuperstepError, OSError) as error:
            wrong = find_damaged(parts)
            if wrong and all(memory.has_table for memory in self._memories):
                self._refuse(snapshot, wrong)
                return 0.0
            if isinstance(error, DiskFault) and (pause_s := self._pause_s(snapshot)) is not None:
                return pause_s
            size, problems, outcome = 0, (str(error),), FAILED
        self._failed = None
        for memory, slot in parts:
            memory.put(slot, "written_bytes", size)
            memory.put(slot, "microseconds", round(1e6 * (time.perf_counter() - began_s)))
            memory.put_note(slot, " ".join(problems))
            memory.put(slot, "disk", outcome)
        return 0.0

    def _pause_s(self, snapshot: WantedSnapshot) -> float | None:
        """Seconds before a failed snapshot is tried again; None where it is given up."""
        tries = self._failed[1] if self._failed is not None and self._failed[0] == snapshot else 0
        self._failed = snapshot, tries + 1
        return PAUSES_S[tries] if tries < len(PAUSES_S) else None

    def _refuse(self, snapshot: WantedSnapshot, wrong: Sequence[int]) -> None:
        """Withdraw a snapshot from the disk; rank 0 reads the reason, and all ranks copy their state again."""
        for rank, (memory, slot) in enumerate(zip(self._memories, snapshot.slots, strict=True)):
            if rank in wrong:
                memory.void(slot)
            else:
                memory.put(slot, "disk", KEPT)
        self._memories[0].refuse(DamagedSnapshot(snapshot.position.step, wrong[0]))


def write_down(
    parts: Sequence[tuple[SnapshotMemory, int]],
    root: Path,
    keep: int,
    peers: Peers,
    require: Callable[[], None] = lambda: None,
) -> tuple[int, tuple[str, ...]]:
    """Write a state as a checkpoint. All owners of its parts call this together.

    Args:
        parts: memories of ranks, and the slot of each; that of rank 0 has the files beside the tensors.
        root: of the checkpoints.
        keep: number of checkpoints that stay.
        peers: owners of the other parts.
        require: called at the start, before the checkpoint has its name, and before older ones are removed; raises
            where nothing may be written there.

    Returns:
        Bytes of tensors on disk, 0 if it exists already; and one line for each old checkpoint that cannot be deleted.

    Raises:
        Fault: it cannot be written: a DiskFault for an error of the disk; or a slot is damaged.
    """

    def confirm() -> None:
        require()
        if find_damaged(parts):
            raise Fault(f"{describe_damage(position.step)}; it is not written.")

    tables, position = [memory.table() for memory, _ in parts], parts[0][0].position(parts[0][1])
    place = checkpoint_at(root, position.step)
    require()
    if is_there(peers, place):  # the run has been at this step before
        return 0, ()
    mine: dict[str, str] = next((table["beside"] for table in tables if table["beside"]), {})
    pieces = (piece for memory, slot in parts for piece in pieces_of(memory, slot))
    shapes = {name: tuple(shape) for name, shape in tables[0]["shapes"].items()}
    files = next((file_map for file_map in peers.gather(mine, dict[str, str]) if file_map), {})
    weights = {name: shape for name, shape in shapes.items() if not name.endswith(SCALE)}
    tensors = {kind: weights if kind == "weight" else shapes for kind in tables[0]["kinds"]}
    size = save(place, pieces, position, peers, tensors=tensors, beside=files, confirm=confirm)
    require()
    return size, drop_old(place, keep, peers)

"""What faults leave in the memory of snapshots: ranks killed at random instants of a copy, and at each point of one."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.fault_ranks import RANKS, SHAPES, STATE, between, forked, pieces, what_is
from superstep.comm.device import Device
from superstep.engine.flat.snapshots import FlushResult, Snapshots
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.manifest import Position
from superstep.state.snapshots.background_checkpoint import Flusher
from superstep.state.snapshots.memory_snapshot import (
    Field,
    SnapshotMemory,
    common,
    describe_pieces,
    make_memories,
    pieces_of,
)
from superstep.state.tensor_piece import TensorPiece


def snapshot_kills(rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    """What is left where ranks copy step after step into memory, every third for the disk, and one of them is killed or
    the process that writes to the disk: the newest common step in memory, and each checkpoint, are wholly of one step.
    """
    draw = random.Random(seed)
    torch.set_num_threads(1)
    wrong: list[str] = []
    found: Counter[str] = Counter()
    for number in range(rounds):
        root = folder / f"snapshots-{number}"
        victim, after_s = draw.randrange(RANKS + 1), draw.uniform(0.02, 0.4)
        _, memories = make_memories(RANKS)
        _copy_and_kill(memories, root, victim, after_s)
        step = common(memories)
        seen = [what_is(place) for place in checkpoints(root)]
        found["rank" if victim < RANKS else "flusher"] += 1
        found["checkpoints"] += len(seen)
        finished = max(max(memory.whole(), default=0) for memory in memories)
        if step is not None and step < finished - 1:
            wrong.append(f"round {number}: {finished - step} steps lost")
        if step is not None and not _is_of_one_step(memories, step):
            wrong.append(f"round {number}: memory of step {step} is mixed")
        if not all(each.startswith("step ") for each in seen):
            wrong.append(f"round {number}, victim {victim}, after {after_s:.4f} s: {seen}")
        for memory in memories:
            memory.close()
        shutil.rmtree(root, ignore_errors=True)
    return {"rounds": rounds, "of": dict(found), "wrong": wrong}


class _Dying(SnapshotMemory):
    """A memory whose process kills itself before so manieth a write to it."""

    left: int | None = None

    def put(self, slot: int, field: Field, value: int) -> None:
        """Set a number of a slot."""
        self._comes()
        super().put(slot, field, value)

    def values(self, slot: int, offset: int, count: int) -> torch.Tensor:
        """What is about to be copied to."""
        self._comes()
        return super().values(slot, offset, count)

    def _comes(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)


def snapshot_points(folder: Path) -> dict[str, Any]:
    """The same where the rank is killed at each point of a copy in turn: before each number that it writes to the
    memory, and each piece. Chance has no part in it: a slot that is said to be whole too early is found out.
    """
    torch.set_num_threads(1)
    wrong: list[str] = []
    point = 0
    while True:
        root = folder / f"point-{point}"
        _, memories = make_memories(2)
        dying = _Dying(memories[0].handle)
        has_died = _copy_until(dying, memories[1], root, point)
        step = common(memories)
        if step not in ({POINT_STEP - 1, POINT_STEP} if has_died else {POINT_STEP}):
            wrong.append(f"point {point}: step {step} is gone on from")
        elif not _is_of_one_step(memories, step):
            wrong.append(f"point {point}: memory of step {step} is mixed")
        for memory in memories:
            memory.close()
        if not has_died:
            return {"points": point, "wrong": wrong}
        point += 1


POINT_STEP = 3


def _copy_until(dying: _Dying, other: SnapshotMemory, root: Path, point: int) -> bool:
    """Two ranks copy POINT_STEP steps, of which the first is to die in the last; whether it did."""
    for rank, memory in enumerate((dying, other)):
        _lay_out(memory, rank, 2, root)

    def copy(memory: SnapshotMemory) -> None:
        copies = _Copies(memory)
        for step in range(1, POINT_STEP + 1):
            if step == POINT_STEP and isinstance(memory, _Dying):
                memory.left = point
            copies.copy(step, is_for_disk=False)

    processes = [forked(lambda memory=memory: copy(memory)) for memory in (dying, other)]  # type: ignore[misc]
    ends = [os.waitpid(process, 0)[1] for process in processes]
    assert ends[1] == 0
    return ends[0] != 0


def _lay_out(memory: SnapshotMemory, rank: int, size: int, root: Path) -> None:
    placed, at = [], 0
    for piece in _by_unit(rank, size):
        placed.append((piece, at))
        at += 4 * piece.values.numel()
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    table = {
        "pieces": describe_pieces(placed),
        "kinds": list(STATE),
        "shapes": shapes,
        "beside": {},
        "folder": str(root),
    }
    memory.lay_out(table, at)


def _by_unit(rank: int, size: int) -> list[TensorPiece]:
    """A rank's pieces in the order in which they are copied: a unit's weight and moments, then those of the next."""
    return sorted(pieces(0, rank, size), key=lambda piece: list(SHAPES).index(piece.name))


class _Copies:
    """A rank that does nothing but copy, as a rank that trains does it: a unit for each tensor, of its size here."""

    def __init__(self, memory: SnapshotMemory) -> None:
        told = memory.table()["pieces"]
        self.tensors = [torch.empty(each["count"]) for each in told]
        self._kinds = [STATE.index(each["kind"]) for each in told]
        parts = len(STATE)
        self._units = range(len(SHAPES))
        held = {u: self.tensors[u * parts : (u + 1) * parts] for u in self._units}
        self._snapshots = Snapshots(
            memory,
            {u: (SimpleNamespace(state=tensors),) for u, tensors in held.items()},  # type: ignore[misc]
            Device("cpu"),
        )

    def copy(self, step: int, *, is_for_disk: bool) -> None:
        for tensor, kind in zip(self.tensors, self._kinds, strict=True):
            tensor.fill_(1000.0 * step + kind)
        self._snapshots.begin(Position(step=step), _ignored, is_for_disk=is_for_disk)
        for pending in [self._snapshots.copy(unit) for unit in self._units]:
            pending.wait()
        self._snapshots.report_written(_ignored)


def _ignored(_: FlushResult) -> None:
    """Who counts checkpoints here looks at the disk."""


def _copy_and_kill(memories: Sequence[SnapshotMemory], root: Path, victim: int, after_s: float) -> None:
    for rank, memory in enumerate(memories):
        _lay_out(memory, rank, RANKS, root)
    ends = [Pipe() for _ in range(RANKS)]

    def flusher() -> None:
        with Flusher(memories, root, keep=2):
            time.sleep(60)

    processes = [forked(lambda number=number: _copy(memories[number], ends[number][1])) for number in range(RANKS)]  # type: ignore[misc]
    processes.append(forked(flusher))
    processes.append(forked(lambda: between([theirs for theirs, _ in ends])))
    time.sleep(after_s)
    os.kill(processes[victim], signal.SIGKILL)
    time.sleep(0.01)
    for process in processes:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    for pair in ends:
        for end in pair:
            end.close()


def _copy(memory: SnapshotMemory, pipe: Connection) -> None:
    """The state of each step, in step with the others."""
    copies = _Copies(memory)
    for step in itertools.count(1):
        pipe.send(step)
        pipe.recv()
        copies.copy(step, is_for_disk=step % 3 == 0)


def _is_of_one_step(memories: Sequence[SnapshotMemory], step: int) -> bool:
    return all(
        bool((piece.values == 1000.0 * step + STATE.index(piece.kind)).all())
        for memory in memories
        for piece in pieces_of(memory, memory.whole()[step])
    )

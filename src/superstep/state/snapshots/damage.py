"""Damaged snapshots: found by their checksums, dropped, and reported with their rank.

before a lost rank is recovered from a slot     the next older state that is complete everywhere, or a checkpoint
after a checkpoint was written from slots       it is discarded before it has a name, and another copy is taken
after a slot was sent to another host           it is dropped there and here, and another is sent
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from superstep.state.snapshots.memory_snapshot import SnapshotMemory, common, describe_damage

Part = tuple[SnapshotMemory, int]
"""A rank's slot."""


def find_damaged(parts: Sequence[Part]) -> list[int]:
    """Indices of the damaged slots. They are read in parallel."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = threads.map(lambda part: part[0].is_damaged(part[1]), parts)
        return [at for at, is_damaged in enumerate(results) if is_damaged]


def newest_undamaged(
    memories: Sequence[SnapshotMemory], idle: AbstractContextManager[object]
) -> tuple[int | None, tuple[str, ...]]:
    """The newest step with a complete and undamaged state on every rank; and a line for each damaged newer one, which
    is dropped.

    Args:
        memories: of all ranks.
        idle: within it nothing else reads them.
    """
    warnings: list[str] = []
    while (step := common(memories)) is not None:
        wrong = find_damaged([(memory, memory.whole()[step]) for memory in memories])
        if not wrong:
            break
        with idle:
            for rank in wrong:
                if step in memories[rank].whole():
                    warnings += _void(memories[rank], memories[rank].whole()[step], rank)
    return step, tuple(warnings)


def void_damaged(memories: Sequence[SnapshotMemory], first: int = 0) -> list[str]:
    """Drop damaged states; one line for each.

    Args:
        memories: of ranks.
        first: the number of the first of them.
    """
    parts = [(memory, slot, rank) for rank, memory in enumerate(memories, first) for slot in memory.states().values()]
    wrong = find_damaged([(memory, slot) for memory, slot, _ in parts])
    return [text for at in wrong for text in _void(*parts[at])]


def _void(memory: SnapshotMemory, slot: int, rank: int) -> Iterable[str]:
    step = memory.get(slot, "step")
    memory.void(slot)
    return (f"rank {rank}: {describe_damage(step)}",)

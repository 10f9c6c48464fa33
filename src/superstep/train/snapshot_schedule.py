"""Copies of the state in memory that outlives the rank, and those that the disk shall have: what the loop asks for."""

from __future__ import annotations

import time
from collections.abc import Callable

from superstep.engine.flat.snapshots import FlushResult, Snapshots
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import DamagedSnapshot

POLL_S = 0.01


class SnapshotSchedule:
    """One rank's; without snapshots nothing is due, and all that is asked for is on the disk.

    Args:
        every: steps between two.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every or 1
        self._wanted: int | None = None
        self.snapshots: Snapshots | None = None
        self.is_flushed = True
        """Whether who owns the memory writes checkpoints from it."""

    def begin(self, position: Position, told: Callable[[FlushResult], None]) -> None:
        """Have the next step copy the state as it is now, where that is due.

        Args:
            position: where training stands by that state.
            told: of what has come to the disk, where its place in memory is needed.
        """
        is_wanted = self._wanted == position.step
        if self.snapshots is not None and (is_wanted or position.step % self._every == 0):
            self._wanted = None
            self.snapshots.begin(position, told, is_for_disk=is_wanted)

    def want(self, position: Position) -> bool:
        """Have the state as it is now written to disk while training goes on; False where nobody does so."""
        if self.snapshots is None or not self.is_flushed:
            return False
        self._wanted = position.step
        return True

    def tell(self, told: Callable[[FlushResult], None]) -> None:
        """Tell of what has come to the disk since this was last asked."""
        if self.snapshots is not None:
            self.snapshots.tell(told)

    def take_refused(self) -> DamagedSnapshot | None:
        """The snapshot that did not come to the disk, as it was damaged; once, and on rank 0."""
        return None if self.snapshots is None else self.snapshots.take_refused()

    def steps(self) -> set[int]:
        """Those whose state is whole in this rank's memory."""
        return set() if self.snapshots is None else self.snapshots.steps()

    def forget_after(self, step: int) -> None:
        """Have no state of a later step, nor want one."""
        self._wanted = None
        if self.snapshots is not None:
            self.snapshots.forget_after(step)

    def drain(self) -> None:
        """Wait until the disk has what it shall have, or cannot."""
        while self.snapshots is not None and self.snapshots.is_behind():
            time.sleep(POLL_S)

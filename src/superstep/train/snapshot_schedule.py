"""Schedule of snapshots in memory that outlives the rank, and of those that are written to disk."""

from __future__ import annotations

import time
from collections.abc import Callable

from superstep.comm.objects import RankPeers
from superstep.engine.flat.snapshots import FlushResult, Snapshots
from superstep.errors import DamagedCheckpoint
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import HOSTS_SLOTS, SLOTS, DamagedSnapshot, describe_damage
from superstep.train.policy.corruption_check import ranks_text

POLL_S = 0.01


class SnapshotSchedule:
    """The schedule of one rank; without snapshots nothing is due, and requests go to the disk.

    Args:
        every: steps between two.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every or 1
        self._wanted: int | None = None
        self.snapshots: Snapshots | None = None
        self.is_flushed = True
        """Whether who owns the memory writes checkpoints from it."""

    def keep(self, snapshots: Snapshots, epoch: int, *, is_whole: bool) -> int:
        """Schedule these snapshots; the slots of their memory.

        Args:
            snapshots: of this rank.
            epoch: number of starts by launchers of several hosts; 0 with one launcher.
            is_whole: whether a snapshot has all that a checkpoint has.
        """
        self.snapshots = snapshots
        self.is_flushed = epoch == 0 and is_whole
        snapshots.turn = epoch << 32
        return HOSTS_SLOTS if epoch else SLOTS

    @property
    def unpinned(self) -> str:
        """Why a GPU cannot copy directly into snapshot memory; empty where it can, or without snapshots."""
        return "" if self.snapshots is None else self.snapshots.unpinned

    def begin(self, position: Position, report: Callable[[FlushResult], None]) -> None:
        """Let the next step copy the current state, if due.

        Args:
            position: of that state.
            report: receives results of writes to disk, when their memory is needed.
        """
        is_wanted = self._wanted == position.step
        if self.snapshots is not None and (is_wanted or position.step % self._every == 0):
            self._wanted = None
            self.snapshots.begin(position, report, is_for_disk=is_wanted)

    def want(self, position: Position) -> bool:
        """Request that the current state is written to disk in the background; False without snapshots on disk."""
        if self.snapshots is None or not self.is_flushed:
            return False
        self._wanted = position.step
        return True

    def tell(self, report: Callable[[FlushResult], None]) -> None:
        """Report writes to disk since the last call."""
        if self.snapshots is not None:
            self.snapshots.report_written(report)

    def take_refused(self) -> DamagedSnapshot | None:
        """The damaged snapshot that was not written to disk; returned once, on rank 0."""
        return None if self.snapshots is None else self.snapshots.take_refused()

    def steps(self) -> set[int]:
        """Steps with complete state in this rank's memory."""
        return set() if self.snapshots is None else self.snapshots.steps()

    def fill(self, step: int, peers: RankPeers) -> Position:
        """Restore the state after a step from memory. Every rank calls this together.

        Raises:
            DamagedCheckpoint: a rank's copy has other bits than were copied; on every rank the same, before anything is
                changed.
        """
        assert self.snapshots is not None
        is_damaged = peers.gather(self.snapshots.is_damaged(step), bool)
        damaged = [rank for rank, each in enumerate(is_damaged) if each]
        if damaged:
            raise DamagedCheckpoint(f"{ranks_text(damaged)}: {describe_damage(step)}")
        return self.snapshots.fill(step)

    def forget_after(self, step: int) -> None:
        """Drop states and requests of later steps."""
        self._wanted = None
        if self.snapshots is not None:
            self.snapshots.forget_after(step)

    def drain(self) -> None:
        """Wait until pending writes to disk have ended."""
        while self.snapshots is not None and self.snapshots.is_behind():
            time.sleep(POLL_S)

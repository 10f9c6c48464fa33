"""Recovery of a run that has lost a rank: restart from the newest snapshot that all ranks have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from superstep.errors import RankLost
from superstep.launch.retry import next_try
from superstep.state.snapshots.damage import newest_undamaged
from superstep.state.snapshots.memory_snapshot import SnapshotMemory


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery.

    Attributes:
        step: finished steps of the snapshot; None without one: resume from the newest checkpoint.
        lost: the lost rank, and how.
        lost_at_s: when that was detected, in seconds of the host's clock.
        is_gain: whether a host came instead, named by ``lost``.
        passed_over: damage of newer snapshots.
    """

    step: int | None
    lost: str
    lost_at_s: float
    is_gain: bool = False
    passed_over: tuple[str, ...] = ()


def recovering(
    launch: Callable[[Recovery | None], bool],
    memories: Sequence[SnapshotMemory],
    idle: AbstractContextManager[object],
    restore: Callable[[], None],
) -> bool:
    """Call ``launch``, and again after a loss of ranks: with the newest snapshot that all ranks have, or without one if
    all are damaged.

    Args:
        launch: trains.
        memories: of all ranks.
        idle: within it nothing else reads them.
        restore: restores a terminal that the lost ranks had.

    Raises:
        Lost: there is no snapshot, or ranks are lost repeatedly after the same step.
    """
    recovered: Recovery | None = None
    tries = 0
    while True:
        try:
            return launch(recovered)
        except RankLost as lost:
            step, passed_over = newest_undamaged(memories, idle)
            following = next_try(tries, is_same_state=recovered is not None and recovered.step == step)
            if (step is None and not passed_over) or following is None:
                raise
            tries = following
            if step is None:
                for memory in memories:
                    memory.forget_after(-1)
            restore()
            recovered = Recovery(step, str(lost), lost.at_s, passed_over=passed_over)

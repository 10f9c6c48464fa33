"""Recovering: a run that has lost a rank, started again from the newest snapshot that all ranks have."""

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
    """That a run goes on, and from which snapshot.

    Attributes:
        step: finished steps; None where nobody has a snapshot, and it goes on from the newest checkpoint.
        lost: the rank that was lost, and how.
        lost_at_s: when that was seen, in seconds of the host's clock.
        is_gain: whether nothing was, and ``lost`` is the host that came.
        passed_over: what is wrong with newer snapshots.
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
    """What ``launch`` returns, called again where a rank was lost: with the newest snapshot that all ranks have, or
    without one where all are damaged.

    Args:
        launch: trains.
        memories: of all ranks.
        idle: within it nobody else reads them.
        restore: gives back a terminal that the lost ranks had.

    Raises:
        Lost: there is none, or ranks are lost again and again after the same step.
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

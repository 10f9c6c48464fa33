"""Ranks of a run of rewards: launched, and launched again where some were lost, or the run goes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial

from superstep.launch.retry import next_try
from superstep.observe.events import Resumed
from superstep.run.recover import Recovered, recovering
from superstep.run.reports.samples import sampling
from superstep.state.snapshots.background_checkpoint import rank_memories
from superstep.state.snapshots.memory_snapshot import SnapshotMemory, common
from superstep.tune.rl.job import RlJob, note_rollback, relaunched
from superstep.tune.rl.rl_step import WentBack

Launch = Callable[[RlJob], bool]
"""Launches the ranks; whether they were asked to stop before the last step, and have."""


def launch_rl(job: RlJob, launch: Launch, restore: Callable[[], None]) -> bool:
    """Train to the last step, or to where the run is asked to stop; whether it was.

    Args:
        job: what every rank is told.
        launch: its ranks. Where there are snapshots, those that are lost are launched again.
        restore: gives back a terminal that ended ranks had.

    Raises:
        Lost: a rank was lost, and there is no snapshot; or it is lost again and again after the same step.
        WentBack: the run goes back again and again to the same step.
    """
    state = job.run.config.state
    with ExitStack() as stack:
        memories: Sequence[SnapshotMemory] = ()
        idle: AbstractContextManager[object] = nullcontext()
        if state.snapshot_every is not None:
            kept = stack.enter_context(rank_memories(job.run.plan.mesh.world, job.folder.root, keep=state.keep))
            memories, idle, job = kept.memories, kept.idle, replace(job, snapshots=kept.handles)
        finish = stack.enter_context(sampling(job.folder, job.run.config.observe.sample))
        is_stopped = recovering(partial(_attempt, job, launch, memories, restore), memories, idle, restore)
        if not is_stopped:
            finish()
        return is_stopped


def _attempt(
    job: RlJob,
    launch: Launch,
    memories: Sequence[SnapshotMemory],
    restore: Callable[[], None],
    lost: Recovered | None,
) -> bool:
    """What ``launch`` returns, called again after each time that the run goes back."""
    now = job if lost is None else _after_loss(job, lost)
    tries, newest = 0, -1
    while True:
        try:
            return launch(now)
        except WentBack as back:
            following = next_try(tries, is_same_state=back.to_step == newest)
            if following is None:
                raise
            tries, newest = following, back.to_step
            restore()
            note_rollback(job.folder, back.to_step)
            is_in_memory = common(memories) == back.to_step
            if not is_in_memory:
                for memory in memories:
                    memory.forget_after(-1)
            now = relaunched(job, back.to_step if is_in_memory else None)


def _after_loss(job: RlJob, lost: Recovered) -> RlJob:
    """What ranks are told that are launched after some were lost."""
    again = relaunched(job, lost.step)
    told = Resumed(step=again.program.cursor.step, path="", lost=lost.lost, passed_over=lost.passed_over)
    return replace(again, resumed=replace(told, lost_at_s=lost.lost_at_s))

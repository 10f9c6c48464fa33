"""Launch the ranks of a run of rewards, and relaunch them after a loss."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial

from superstep.comm.device import choose
from superstep.launch.ranks import launch_on, launch_parties
from superstep.observe.events import Resumed
from superstep.run.console import Console
from superstep.run.exit_messages import status_of
from superstep.run.recover import Recovery, recovering
from superstep.run.reports.report import leave_report
from superstep.run.reports.samples import sampling
from superstep.run.rl.rl_rank import VERB, run_worlds
from superstep.state.snapshots.background_checkpoint import rank_memories
from superstep.state.snapshots.memory_snapshot import SnapshotMemory
from superstep.tune.rl.job import RlJob, relaunch


def launch_rl(job: RlJob, console: Console) -> int | None:
    """Train on ranks of this host; the exit status if it ends before the last step.

    Args:
        job: of every rank.
        console: shows the run.

    Raises:
        Lost: a rank was lost, and there is no snapshot; or it is lost repeatedly after the same step.
    """
    return status_of(lambda: _launch(job, console), job.folder, console, VERB)


def _launch(job: RlJob, console: Console) -> bool:
    """Whether the run stopped before its last step on request; lost ranks are relaunched if there are snapshots."""
    state = job.run.config.state
    with ExitStack() as stack:
        memories: Sequence[SnapshotMemory] = ()
        idle: AbstractContextManager[object] = nullcontext()
        if state.snapshot_every is not None:
            kept = stack.enter_context(rank_memories(job.run.plan.mesh.world, job.folder.root, keep=state.keep))
            memories, idle, job = kept.memories, kept.idle, replace(job, snapshots=kept.handles)
        finish = stack.enter_context(sampling(job.folder, job.run.config.observe.sample))
        is_stopped = recovering(partial(_attempt, job, console), memories, idle, console.restore)
        if is_stopped:
            leave_report(job.folder)
        else:
            finish()
        return is_stopped


def _launch_ranks(job: RlJob, console: Console) -> bool:
    """Launch the ranks once; whether they stopped before the last step on request."""
    device, worlds = job.run.config.plan.device, run_worlds(job, console)
    if len(worlds) == 1 and job.snapshots is None:
        only = worlds[0]
        return bool(launch_on(device, only.size, only.worker, *only.args, **only.kwargs))
    # Memory that outlives a rank needs separate processes.
    return bool(launch_parties(choose(device, sum(each.size for each in worlds)), worlds))


def _attempt(job: RlJob, console: Console, lost: Recovery | None) -> bool:
    """Call ``_launch_ranks``, again after a loss."""
    return _launch_ranks(job if lost is None else _after_loss(job, lost), console)


def _after_loss(job: RlJob, lost: Recovery) -> RlJob:
    """The job of ranks after a loss."""
    again = relaunch(job, lost.step)
    resumed = Resumed(step=again.program.cursor.step, path="", lost=lost.lost, passed_over=lost.passed_over)
    return replace(again, resumed=replace(resumed, lost_at_s=lost.lost_at_s))

"""Launch a run's ranks on this host, and relaunch lost ones from snapshots; or join those of torchrun."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial

from superstep.comm.device import choose
from superstep.launch.ranks import World, launch_apart, launch_on
from superstep.launch.torchrun import join, one_world
from superstep.run.console import Console
from superstep.run.exit_messages import status_of, status_under_torchrun
from superstep.run.job import TrainJob, device_setting
from superstep.run.job_message import JOB
from superstep.run.rank import rank
from superstep.run.recover import Recovery, recovering
from superstep.run.reports.samples import sampling
from superstep.state.snapshots.background_checkpoint import rank_memories
from superstep.state.snapshots.memory_snapshot import Handles
from superstep.state.verify import newest
from superstep.train.run_folder.failure_report import leaving_words

Worker = Callable[[World, TrainJob, Console], bool]
"""The work of each rank; returns whether it stopped before the last step on request."""


def launch(job: TrainJob, console: Console, worker: Worker | None = None) -> int | None:
    """Train on ranks of this host; the exit status if it ends before the last step.

    Args:
        job: of every rank.
        console: shows the run.
        worker: of each rank; None means ``rank``.
    """
    return status_of(lambda: _launch(job, worker or rank, console), job.folder, console, job.verb)


def join_torchrun(prepare: Callable[[int], AbstractContextManager[TrainJob | None]], console: Console) -> int:
    """Train as a rank of torchrun or srun; its exit status.

    Args:
        prepare: makes the job of a number of ranks; rank 0 alone calls it.
        console: shows the run.
    """
    return int(join(prepare, one_world(partial(_rank_of_torchrun, console=console)), JOB, device_setting))


def _rank_of_torchrun(world: World, job: TrainJob | None, console: Console) -> int:
    """One rank's exit status; rank 0 shows messages."""
    if job is None:
        return 0
    return status_under_torchrun(world, lambda: rank(world, job, console), job.folder, console, job.verb)


def _launch(job: TrainJob, worker: Worker, console: Console) -> bool:
    """Whether the run stopped before its last step on request."""
    with sampling(job.folder, job.run.config.observe.sample) as finish:
        is_stopped = _train(job, worker, console)
        if not is_stopped:
            finish()
        return is_stopped


def _train(job: TrainJob, worker: Worker, console: Console) -> bool:
    """Whether the run stopped on request; lost ranks are relaunched if there are snapshots."""
    world, state = job.run.plan.mesh.world, job.run.config.state
    with suppress(OSError):  # of an earlier launch
        job.folder.fault.unlink()
    if state.snapshot_every is None:
        return leaving_words(job.folder, lambda: launch_on(device_setting(job), world, worker, job, console))
    kind = choose(device_setting(job), world)
    with rank_memories(world, job.folder.root, keep=state.keep) as kept:
        return recovering(
            lambda lost: leaving_words(
                job.folder, lambda: launch_apart(kind, world, worker, _again(job, kept.handles, lost), console)
            ),
            kept.memories,
            kept.idle,
            console.restore,
        )


def _again(job: TrainJob, handles: Handles, lost: Recovery | None) -> TrainJob:
    """The job of ranks with memories, at the first start or after a loss."""
    again = replace(job, snapshots=handles, recovered=lost)
    return again if lost is None or lost.step is not None else replace(again, checkpoint=newest(job.folder.checkpoints))

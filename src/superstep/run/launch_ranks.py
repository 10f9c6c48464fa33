"""Ranks of a run on this host: launched, and launched again where some were lost and there are snapshots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from superstep.comm.device import choose
from superstep.launch.ranks import World, launch_apart, launch_on
from superstep.run.console import Console
from superstep.run.exit_messages import status_of
from superstep.run.job import TrainJob, asked_device
from superstep.run.rank import rank
from superstep.run.recover import Recovery, recovering
from superstep.run.reports.samples import sampling
from superstep.state.snapshots.background_checkpoint import rank_memories
from superstep.state.snapshots.memory_snapshot import Handles
from superstep.state.verify import newest
from superstep.train.run_folder.failure_report import leaving_words

Worker = Callable[[World, TrainJob, Console], bool]
"""What each rank does; whether it was asked to stop before the last step, and has."""


def launch(job: TrainJob, console: Console, worker: Worker | None = None) -> int | None:
    """Train on ranks of this host; the exit status where that was not to the last step.

    Args:
        job: what every rank is told.
        console: shows the run.
        worker: what each of them does; None means ``rank``.
    """
    return status_of(lambda: _launch(job, worker or rank, console), job.folder, console, job.verb)


def _launch(job: TrainJob, worker: Worker, console: Console) -> bool:
    """Whether the run was asked to stop before its last step."""
    with sampling(job.folder, job.run.config.observe.sample) as finish:
        is_stopped = _train(job, worker, console)
        if not is_stopped:
            finish()
        return is_stopped


def _train(job: TrainJob, worker: Worker, console: Console) -> bool:
    """Whether the run was asked to stop; where ranks are lost and there are snapshots, it is gone on with."""
    world, state = job.run.plan.mesh.world, job.run.config.state
    with suppress(OSError):  # of a launch before this one
        job.folder.fault.unlink()
    if state.snapshot_every is None:
        return leaving_words(job.folder, lambda: launch_on(asked_device(job), world, worker, job, console))
    kind = choose(asked_device(job), world)
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
    """What ranks are told that start with memories, for the first time or after some were lost."""
    told = replace(job, snapshots=handles, recovered=lost)
    return told if lost is None or lost.step is not None else replace(told, checkpoint=newest(job.folder.checkpoints))

"""Saving of the state after a step: by the ranks, or in the background from their snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from superstep.engine.flat.snapshots import FlushResult
from superstep.errors import DiskFault
from superstep.monitor.status_page import beside
from superstep.observe.doctor.observations import CHECKPOINT
from superstep.observe.events import Event, Saved, Warned
from superstep.state.manifest import Position
from superstep.train.run_folder.after_checkpoint import WrittenCheckpoint
from superstep.train.run_folder.folder_watch import RunFolderMoved
from superstep.train.save_schedule import attempt
from superstep.train.trainer import Trainer


def save(trainer: Trainer, position: Position, report: Callable[[Event], None], *, is_last: bool) -> None:
    """Write a checkpoint; if the disk fails, schedule another one soon.

    Raises:
        Fault: the run directory was moved or removed; the state is saved at its new path, or beside.
        DiskFault: the disk fails, and the run cannot continue without a checkpoint.
    """
    start_s = time.perf_counter()

    def write() -> tuple[WrittenCheckpoint, RunFolderMoved | None]:
        displaced = trainer.follow_folder()  # at each try: it may be moved in between
        return trainer.save(position), displaced

    with beside(trainer.heart, CHECKPOINT):
        result = attempt(trainer.saves, position.step, write, report, is_last=is_last, step_s=trainer.retry_step_s)
    if result is None:
        return
    written, displaced = result
    seconds = time.perf_counter() - start_s
    report(Saved(step=position.step, path=str(written.path), seconds=seconds, bytes=written.bytes))
    warn(written.problems, position, report)
    if displaced is not None:
        raise displaced.fault(position.step)


def report_flushed(
    trainer: Trainer, report: Callable[[Event], None], flushed: FlushResult, *, is_over: bool = False
) -> None:
    """Report a checkpoint that was written from a snapshot, or failed; after the run's end another one follows.

    Raises:
        DiskFault: it failed, and the newest checkpoint is too old to continue.
    """
    if flushed.is_on_disk:
        trainer.saves.note_saved(flushed.step)
        if (path := trainer.find_flushed(flushed.step)) is None:
            report(Warned(step=flushed.step, text="its checkpoint was written, but has disappeared."))
        else:
            report(Saved(step=flushed.step, path=str(path), seconds=flushed.seconds, bytes=flushed.bytes))
    elif not is_over and trainer.saves.is_too_old(flushed.step):
        raise DiskFault(flushed.problems, step=flushed.step)
    if flushed.problems:
        report(Warned(step=flushed.step, text=flushed.problems))


def warn(problems: Sequence[str], position: Position, report: Callable[[Event], None]) -> None:
    """Report problems beside a checkpoint."""
    for problem in problems:
        report(Warned(step=position.step, text=problem))

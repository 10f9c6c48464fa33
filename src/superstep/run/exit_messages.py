"""Messages of a run that ends before its last step: the reason, the newest checkpoint, and how to resume."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from superstep.errors import Fault
from superstep.launch.ranks import World
from superstep.launch.stop_request import STOPPED
from superstep.run.console import Console
from superstep.run.reports.report import leave_report
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train.run_folder.run_paths import RunFolder

INTERRUPTED = 130


def end_by_signal(
    error: BaseException, folder: RunFolder, console: Console, verb: str = "train", *, is_of_torchrun: bool = False
) -> int | None:
    """The exit status after Ctrl-C or a SIGTERM without a graceful stop, with a message; None after anything else. A
    fault of a started run gets a line on how to resume.

    Args:
        error: that ended the run.
        folder: of the run.
        console: shows the message.
        verb: the words after superstep that resume the run.
        is_of_torchrun: whether torchrun or srun launched it, with flags that are not known here.
    """
    match error:
        case KeyboardInterrupt():
            status, what = INTERRUPTED, "interrupted"
        case SystemExit(code=code) if code == STOPPED:
            has_begun = folder.config.is_file()
            status, what = STOPPED, f"ended by SIGTERM{', before the step was done' if has_begun else ''}"
        case Fault(saved_in=place) if place:
            error.adding(how_to_go_on(RunFolder(root=Path(place)), verb, is_moved=True, is_of_torchrun=is_of_torchrun))
            return None
        case Fault() if folder.config.is_file():
            error.adding(how_to_go_on(folder, verb, is_of_torchrun=is_of_torchrun))
            return None
        case _:
            return None
    console.warn(f"{what}. {how_to_go_on(folder, verb, is_of_torchrun=is_of_torchrun)}")
    return status


def end_by_stop(folder: RunFolder, console: Console, verb: str = "train", *, is_of_torchrun: bool = False) -> int:
    """The exit status after a graceful stop by SIGTERM, with a message."""
    console.warn(f"stopped by SIGTERM. {how_to_go_on(folder, verb, is_of_torchrun=is_of_torchrun)}")
    return STOPPED


def status_of(go: Callable[[], bool], folder: RunFolder, console: Console, verb: str) -> int | None:
    """The exit status of a run that ends before its last step; None for a complete one.

    Args:
        go: trains; returns whether it stopped before the last step on request.
        folder: of the run.
        console: shows the reason, and how to resume.
        verb: the words after superstep that resume the run.
    """
    try:
        is_stopped = go()
    except BaseException as error:
        console.restore()
        leave_report(folder)
        if (status := end_by_signal(error, folder, console, verb)) is not None:
            return status
        raise
    return end_by_stop(folder, console, verb) if is_stopped else None


def status_under_torchrun(world: World, go: Callable[[], bool], folder: RunFolder, console: Console, verb: str) -> int:
    """The exit status of a rank under torchrun or srun; rank 0 shows messages. As ``status_of``."""
    try:
        is_stopped = go()
    except (KeyboardInterrupt, SystemExit, Fault) as error:
        if world.rank == 0 and (status := end_by_signal(error, folder, console, verb, is_of_torchrun=True)) is not None:
            return status
        raise
    if is_stopped and world.rank == 0:
        return end_by_stop(folder, console, verb, is_of_torchrun=True)
    return STOPPED if is_stopped else 0


def how_to_go_on(
    folder: RunFolder, verb: str = "train", *, is_moved: bool = False, is_of_torchrun: bool = False
) -> str:
    """The newest checkpoint and the command that resumes from it, if any; ``is_moved`` if the run began in another
    folder.
    """
    if not (is_moved or folder.config.is_file()):
        return "The run had not begun: there is no state to resume from."
    # The run's own settings are in its folder: the command needs no other flag.
    place = f"--state.dir {shlex.quote(str(folder.root))} "
    command = f"superstep {verb} {place}--state.existing resume"
    saved = checkpoints(folder.checkpoints)
    if is_of_torchrun:
        newest = f"The newest checkpoint is {saved[-1]}" if saved else "The run has no checkpoint yet"
        return f"{newest}; start the same command again with {place if is_moved else ''}--state.existing resume."
    if not saved:
        return f"The run has no checkpoint yet; start it again with: {command}"
    return f"The newest checkpoint is {saved[-1]}; resume with: {command}"

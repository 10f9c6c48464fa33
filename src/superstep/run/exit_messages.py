"""What is said when a run ends before its last step: by what, the newest checkpoint, and how to go on from it."""

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


def ended(
    error: BaseException, folder: RunFolder, console: Console, verb: str = "train", *, is_of_torchrun: bool = False
) -> int | None:
    """The exit status after Ctrl-C or a SIGTERM that was not waited for, told in one line; None after anything else. A
    fault of a run that has begun says how to go on, wherever it is told.

    Args:
        error: that ended the run.
        folder: of the run.
        console: is told.
        verb: the words after superstep that go on with the run.
        is_of_torchrun: whether torchrun or srun launched it, whose flags are not known here.
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


def stopped(folder: RunFolder, console: Console, verb: str = "train", *, is_of_torchrun: bool = False) -> int:
    """The exit status after a SIGTERM that the run has come to an end for, told in one line."""
    console.warn(f"stopped by SIGTERM. {how_to_go_on(folder, verb, is_of_torchrun=is_of_torchrun)}")
    return STOPPED


def status_of(go: Callable[[], bool], folder: RunFolder, console: Console, verb: str) -> int | None:
    """The exit status of a run that does not come to its last step; None where it does.

    Args:
        go: trains; returns whether it was asked to stop before the last step.
        folder: of the run.
        console: is told why, and how to go on.
        verb: the words after superstep that go on with the run.
    """
    try:
        is_stopped = go()
    except BaseException as error:
        console.restore()
        leave_report(folder)
        if (status := ended(error, folder, console, verb)) is not None:
            return status
        raise
    return stopped(folder, console, verb) if is_stopped else None


def status_under_torchrun(world: World, go: Callable[[], bool], folder: RunFolder, console: Console, verb: str) -> int:
    """The exit status of a rank that torchrun or srun has started; rank 0 speaks for all. As ``status_of``."""
    try:
        is_stopped = go()
    except (KeyboardInterrupt, SystemExit, Fault) as error:
        if world.rank == 0 and (status := ended(error, folder, console, verb, is_of_torchrun=True)) is not None:
            return status
        raise
    if is_stopped and world.rank == 0:
        return stopped(folder, console, verb, is_of_torchrun=True)
    return STOPPED if is_stopped else 0


def how_to_go_on(
    folder: RunFolder, verb: str = "train", *, is_moved: bool = False, is_of_torchrun: bool = False
) -> str:
    """The newest checkpoint and the command that goes on from it, as far as there are any; ``is_moved`` where the run
    began in another folder.
    """
    if not (is_moved or folder.config.is_file()):
        return "The run had not begun: there is nothing to go on from."
    # The run's own settings are in its folder: the command needs no other flag.
    place = f"--state.dir {shlex.quote(str(folder.root))} "
    command = f"superstep {verb} {place}--state.existing resume"
    found = checkpoints(folder.checkpoints)
    if is_of_torchrun:
        newest = f"The newest checkpoint is {found[-1]}" if found else "The run has no checkpoint yet"
        return f"{newest}; start the same command again with {place if is_moved else ''}--state.existing resume."
    if not found:
        return f"The run has no checkpoint yet; begin again with: {command}"
    return f"The newest checkpoint is {found[-1]}; go on with: {command}"

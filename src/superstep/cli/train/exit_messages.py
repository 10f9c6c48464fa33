"""What is said when a run ends before its last step: by what, the newest checkpoint, and how to go on from it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from superstep.errors import Fault
from superstep.launch.stop_request import STOPPED
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train.run_paths import RunFolder

INTERRUPTED = 130


def ended(error: BaseException, folder: RunFolder, verb: str = "train") -> int | None:
    """The exit status after Ctrl-C or a SIGTERM that was not waited for, told in one line; None after anything else. A
    fault of a run that has begun says how to go on, wherever it is told.
    """
    match error:
        case KeyboardInterrupt():
            return _told("interrupted", folder, INTERRUPTED, verb)
        case SystemExit(code=code) if code == STOPPED:
            has_begun = folder.config.is_file()
            return _told(f"ended by SIGTERM{', before the step was done' if has_begun else ''}", folder, STOPPED, verb)
        case Fault(saved_in=place) if place:
            error.adding(how_to_go_on(RunFolder(root=Path(place)), verb, is_moved=True))
            return None
        case Fault() if folder.config.is_file():
            error.adding(how_to_go_on(folder, verb))
            return None
        case _:
            return None


def stopped(folder: RunFolder, verb: str = "train") -> int:
    """The exit status after a SIGTERM that the run has come to an end for, told in one line."""
    return _told("stopped by SIGTERM", folder, STOPPED, verb)


def _told(what: str, folder: RunFolder, status: int, verb: str) -> int:
    print(f"superstep: {what}. {how_to_go_on(folder, verb)}", file=sys.stderr, flush=True)
    return status


def how_to_go_on(folder: RunFolder, verb: str = "train", *, is_moved: bool = False) -> str:
    """The newest checkpoint and the command that goes on from it, as far as there are any; ``is_moved`` where the run
    began in another folder.
    """
    if not (is_moved or folder.config.is_file()):
        return "The run had not begun: there is nothing to go on from."
    # The run's own settings are in its folder: the command needs no other flag.
    place = f"--state.dir {shlex.quote(str(folder.root))} "
    command = f"superstep {verb} {place}--state.existing resume"
    found = checkpoints(folder.checkpoints)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # by torchrun or srun, whose flags are not known here
        newest = f"The newest checkpoint is {found[-1]}" if found else "The run has no checkpoint yet"
        return f"{newest}; start the same command again with {place if is_moved else ''}--state.existing resume."
    if not found:
        return f"The run has no checkpoint yet; begin again with: {command}"
    return f"The newest checkpoint is {found[-1]}; go on with: {command}"

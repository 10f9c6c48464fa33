"""Folders that processes make and remove, and what a process that was killed leaves of them.

    superstep-launch-3f2a/superstep-owner     locked by the process that made the folder
    pymp-x81c/superstep-owner                 of the seed's socket, likewise

The system takes the lock back when the process ends, however it ended; so a number that another process has by now is
taken for nobody, also from another container. A folder without such a file is not one of ours.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER = "superstep-owner"
PREFIXES = ("superstep-", "pymp-")


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder that is there for the length of the block. What killed processes left of such folders goes as well.

    Args:
        prefix: of its name, which begins with one of ``PREFIXES``.
    """
    remove_left_folders()
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    handle = own(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def own(folder: Path) -> int:
    """A descriptor that makes a folder this process's own for as long as it is open."""
    handle, unlocked = tempfile.mkstemp(dir=folder)
    with suppress(OSError):  # a file system without locks: nobody else can lock it and remove the folder either
        fcntl.flock(handle, fcntl.LOCK_EX)
    Path(unlocked).rename(folder / OWNER)
    return handle


def remove_left_folders() -> None:
    """Remove this user's temporary folders whose owners have ended."""
    for prefix in PREFIXES:
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):
                status = folder.lstat()
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                    remove_unlocked(folder, OWNER)


def remove_unlocked(folder: Path, mark: str) -> None:
    """Remove a folder if nobody has locked its mark. The mark goes first: who comes later takes the folder for none.

    Raises:
        OSError: somebody has locked it, or there is none.
    """
    handle = os.open(folder / mark, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / mark).unlink()
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)

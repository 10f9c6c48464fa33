"""Temporary folders, and the removal of those that killed processes left.

    superstep-launch-3f2a/superstep-owner     locked by the process that made the folder
    pymp-x81c/superstep-owner                 of the seed's socket, likewise

The kernel releases the lock when the process ends, so a reused process id does not matter, also across containers. A
folder without such a file is not ours.
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
    """A folder for the length of the block. Folders that killed processes left are removed too. ``prefix``: one of
    ``PREFIXES``.
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
    """Lock a folder as this process's own, until the returned descriptor is closed."""
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
    """Remove a folder if nobody has locked its mark. The mark goes first: later processes then ignore the folder.
    Raises OSError where it is locked, or does not exist.
    """
    handle = os.open(folder / mark, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / mark).unlink()
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)

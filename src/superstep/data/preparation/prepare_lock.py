"""One process at a time prepares a folder; the next one waits for it, and finds what it made.

The lock is the system's, on a file in the folder: it ends with the process that holds it, however that ended, so that
none is ever left behind. What the file says is for those who wait. It is removed by who held it.
"""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "preparing.lock"
TRIES = 100


def unheard(line: str) -> None:
    """Tells nobody."""


@contextmanager
def turn(folder: Path, tell: Callable[[str], None] = unheard) -> Iterator[None]:
    """Hold a folder for the length of the block; it is made first, and removed again where nothing came into it.

    A file system without locks, or a folder that cannot be written, is not waited for: who writes there will say what
    is wrong.

    Args:
        folder: what one process at a time may write to.
        tell: given a line for the user where another process has it.
    """
    made: list[Path] = []
    handle = _take(folder, made, tell)
    try:
        yield
    finally:
        if handle is not None:
            # Removed while it is held: who has opened it by then finds out that it is no longer the folder's.
            with suppress(OSError):
                (folder / LOCK).unlink()
            os.close(handle)
        with suppress(OSError):  # something is in it
            for path in made:
                path.rmdir()


def _take(folder: Path, made: list[Path], tell: Callable[[str], None]) -> int | None:
    """A descriptor that holds the lock of a folder, once it is this process's turn; None where there can be none.
    The folders that had to be made are added to ``made``.
    """
    is_told = False
    while (handle := _open(folder, made)) is not None:
        try:
            if not _try(handle):
                if not is_told:
                    tell(f"Waiting for {_holder(handle)}, which prepares the tokens in {folder} ...")
                is_told = True
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_same(folder / LOCK, handle):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {platform.node()}".encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    return None


def _open(folder: Path, made: list[Path]) -> int | None:
    for _ in range(TRIES):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        made.extend(path for path in missing if path not in made)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # another process has just removed the folder, empty as it was
        except OSError:
            break
    return None


def _try(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: there is none to respect
    return True


def _is_same(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    return os.pread(handle, 200, 0).decode(errors="replace") or "another process"

"""Lock of a folder's preparation: the next process waits, and uses the result.

The lock is the system's, on a file in the folder: it ends with its process, however that ended. The file's text is for
waiting processes. The owner removes it.
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


def ignore_line(line: str) -> None:
    """Show no line to the user."""


@contextmanager
def take_turn(folder: Path, tell: Callable[[str], None] = ignore_line) -> Iterator[None]:
    """Lock a folder for the block; it is created first, and removed again if it stays empty.

    A file system without locks, or a folder that cannot be written, is not waited for: the write itself will raise the
    error.

    Args:
        folder: that one process at a time may write to.
        tell: receives a line for the user while another process has it.
    """
    made: list[Path] = []
    handle = _take(folder, made, tell)
    try:
        yield
    finally:
        if handle is not None:
            # Removed while locked: a process that has opened it by then detects that it is no longer the folder's.
            with suppress(OSError):
                (folder / LOCK).unlink()
            os.close(handle)
        with suppress(OSError):  # it is not empty
            for path in made:
                path.rmdir()


def _take(folder: Path, made: list[Path], tell: Callable[[str], None]) -> int | None:
    """A descriptor that holds the lock of a folder; None where locks are not supported. Created folders are added to
    ``made``.
    """
    is_reported = False
    while (handle := _open(folder, made)) is not None:
        try:
            if not _try(handle):
                if not is_reported:
                    tell(f"Waiting for {_holder(handle)}, which prepares the tokens in {folder} ...")
                is_reported = True
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
            continue  # another process has just removed the empty folder
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

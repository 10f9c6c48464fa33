"""Whose a run directory is: two runs never write to one.

The process that prepares a run locks the folder itself; the system drops that lock with the process, however it ends.
It says who it is in a file beside. Ranks may live a moment longer than the process that launched them: as long as they
do they share a lock of that file, which the next run waits for.

    runs/demo           locked by the launcher, alone
    runs/demo/run.lock  who that is: {"pid": 4711, ...}; locked by its ranks together
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from superstep.errors import DiskFault, Fault, StateError, disk_fix, is_full
from superstep.train.run_folder.run_paths import RunFolder

LEAVING_S = 10.0
"""How long ranks without a launcher are waited for; they end within three seconds of it."""

POLL_S = 0.05


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Make the directory, and keep other processes from writing to it for the length of the block.

    What was made and is still empty at the end is removed again: a run that never began leaves nothing.

    Raises:
        StateError: the directory cannot be made, or another process holds it; names that one.
        Fault: the disk is full.
    """
    made = [path for path in (folder.root, *folder.root.parents) if not path.exists()]
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.root, os.O_RDONLY)
    except OSError as error:
        raise _lock_error(folder, error, "made") from error
    is_ours = False
    try:
        _lock(handle, folder)
        is_ours = True
        yield
    finally:
        # One that was moved or removed meanwhile may have a successor under its name, which is not ours to tidy.
        is_there = _is_same(folder.root, handle)
        if is_ours and is_there:
            with suppress(OSError):
                folder.lock.unlink()
        os.close(handle)
        for path in (folder.root / "data", *made) if is_there else ():
            with suppress(OSError):  # it is not empty: something of the run is there
                path.rmdir()


@contextmanager
def sharing(folder: RunFolder) -> Iterator[None]:
    """Within the block no run that comes after this one writes to the directory: what every rank is in."""
    try:
        handle = os.open(folder.lock, os.O_RDONLY)
    except OSError:  # ranks that a test runs, say, without a launcher
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def note_preparing(folder: RunFolder, text: str) -> None:
    """Write into the lock's file of a directory, which this process holds, how far it is; an empty text: it is done."""
    with suppress(OSError, ValueError):  # who asks is told less
        before = folder.lock.read_text(encoding="utf-8")
        after = json.dumps(json.loads(before) | {"preparing": text}) + "\n"
        with folder.lock.open("r+", encoding="utf-8") as file:  # in place: who reads it meanwhile finds no empty file
            file.write(after.ljust(len(before)))


def preparing(folder: RunFolder) -> str | None:
    """What the process that holds a directory does before its ranks begin; None where there is none, or they have."""
    process = owner(folder)
    if process is None:
        return None
    try:
        text = json.loads(folder.lock.read_text(encoding="utf-8")).get("preparing", "")
    except (OSError, ValueError):
        text = ""
    if not text and folder.program.is_file():
        return None
    return f"process {process} prepares it: {text or 'its ranks have not begun'}"


def owner(folder: RunFolder) -> int | None:
    """The process that writes to the directory now, where there is one and it is on this host."""
    try:
        told = json.loads(folder.lock.read_text(encoding="utf-8"))
        process = int(told["pid"])
        handle = os.open(folder.root, os.O_RDONLY)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return process if told.get("host") == platform.node() else None
    except OSError:  # a file system without locks: the number alone is known
        return process if Path(f"/proc/{process}").exists() else None
    finally:
        os.close(handle)
    return None


def sharers(folder: RunFolder) -> list[int]:
    """The processes of this host that are in a run's ``sharing``, as far as they may be seen."""
    lock, found = str(folder.lock.resolve()), []
    for place in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            if any(os.readlink(handle) == lock for handle in place.iterdir()):
                found.append(int(place.parent.name))
    return sorted(found)


def _is_same(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False


def _lock(handle: int, folder: RunFolder) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _in_use(folder, _owner(folder.lock)) from error
    except OSError:  # a file system without locks has none to respect
        pass
    if not os.access(folder.root, os.W_OK | os.X_OK):
        raise StateError(f"state.dir = '{folder.root}' cannot be written; grant access or name another --state.dir.")
    try:
        _wait_for_ranks(folder)
        folder.lock.write_text(json.dumps(_self()) + "\n", encoding="utf-8")
    except OSError as error:
        raise _lock_error(folder, error, "written") from error


def _lock_error(folder: RunFolder, error: OSError, what: str) -> Fault | StateError:
    """A full disk is a fault, and any other reason the user's to mend."""
    told = f"state.dir = '{folder.root}' cannot be {what}: {error.strerror or error}; {disk_fix(error)}"
    return DiskFault(f"{told}.") if is_full(error) else StateError(f"{told}, or name another --state.dir.")


def _wait_for_ranks(folder: RunFolder) -> None:
    """Wait until no rank of a run before is left."""
    if not folder.lock.exists():
        return
    deadline_s = time.monotonic() + LEAVING_S
    handle = os.open(folder.lock, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline_s:
                    raise _in_use(folder, f"ranks that are left of {_owner(folder.lock)}") from error
                time.sleep(POLL_S)
            except OSError:
                return
            else:
                return
    finally:
        os.close(handle)


def _in_use(folder: RunFolder, owner: str) -> StateError:
    return StateError(f"state.dir = '{folder.root}' is in use by {owner}; wait for it, or name another --state.dir.")


def _self() -> dict[str, object]:
    return {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def _owner(path: Path) -> str:
    """The process that a lock's file names."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return f"process {int(told['pid'])} on {told['host']}, since {told['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"

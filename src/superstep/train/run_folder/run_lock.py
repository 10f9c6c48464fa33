"""Lock of a run directory: two runs never write to the same one.

The launcher, which prepares the run, locks the directory itself. The system releases this lock when the launcher ends,
however it ends. The file ``run.lock`` names the launcher. Ranks may outlive their launcher for a moment, so they hold a
shared lock of this file, and the next run waits until none does.

    runs/demo           locked by the launcher, exclusively
    runs/demo/run.lock  its owner: {"pid": 4711, ...}; locked by its ranks, shared
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
"""How long to wait for ranks of a launcher that has ended; they end within three seconds after it."""

POLL_S = 0.05


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Create the directory, and lock it for the block.

    Directories that were created and are still empty at the end are removed: a run that never began leaves nothing.

    Raises:
        StateError: the directory cannot be created, or another process holds it; the error names that process.
        Fault: the disk is full.
    """
    made = [path for path in (folder.root, *folder.root.parents) if not path.exists()]
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.root, os.O_RDONLY)
    except OSError as error:
        raise _lock_error(folder, error, "created") from error
    is_ours = False
    try:
        _lock(handle, folder)
        is_ours = True
        yield
    finally:
        # If the directory was moved or removed, another run may own a new one of the same name: leave that alone.
        is_there = _is_same(folder.root, handle)
        if is_ours and is_there:
            with suppress(OSError):
                folder.lock.unlink()
        os.close(handle)
        for path in (folder.root / "data", *made) if is_there else ():
            with suppress(OSError):  # not empty: it has files of the run
                path.rmdir()


@contextmanager
def hold_shared(folder: RunFolder) -> Iterator[None]:
    """Hold a rank's shared lock for the block, in which no later run writes to the directory."""
    try:
        handle = os.open(folder.lock, os.O_RDONLY)
    except OSError:  # ranks without a launcher, as in tests
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def note_preparing(folder: RunFolder, text: str) -> None:
    """Write the progress of preparation into the lock file; an empty text means done."""
    with suppress(OSError, ValueError):  # the status is optional
        before = folder.lock.read_text(encoding="utf-8")
        after = json.dumps(json.loads(before) | {"preparing": text}) + "\n"
        with folder.lock.open("r+", encoding="utf-8") as file:  # in place, so that readers never see an empty file
            file.write(after.ljust(len(before)))


def preparation_text(folder: RunFolder) -> str | None:
    """What the owner of a directory does until its ranks begin, as text; None later, or without an owner."""
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
    """The process on this host that writes to the directory; None without one."""
    try:
        record = json.loads(folder.lock.read_text(encoding="utf-8"))
        process = int(record["pid"])
        handle = os.open(folder.root, os.O_RDONLY)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return process if record.get("host") == platform.node() else None
    except OSError:  # a file system without locks: only the process id is known
        return process if Path(f"/proc/{process}").exists() else None
    finally:
        os.close(handle)
    return None


def sharers(folder: RunFolder) -> list[int]:
    """Processes of this host that hold a run's shared lock, as far as permissions show them."""
    lock, processes = str(folder.lock.resolve()), []
    for handles in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            if any(os.readlink(handle) == lock for handle in handles.iterdir()):
                processes.append(int(handles.parent.name))
    return sorted(processes)


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
    except OSError:  # a file system without locks
        pass
    if not os.access(folder.root, os.W_OK | os.X_OK):
        raise StateError(f"state.dir = '{folder.root}' cannot be written; grant access or name another --state.dir.")
    try:
        _wait_for_ranks(folder)
        folder.lock.write_text(json.dumps(_self()) + "\n", encoding="utf-8")
    except OSError as error:
        raise _lock_error(folder, error, "written") from error


def _lock_error(folder: RunFolder, error: OSError, what: str) -> Fault | StateError:
    """A DiskFault if the disk is full, else a StateError."""
    problem = f"state.dir = '{folder.root}' cannot be {what}: {error.strerror or error}; {disk_fix(error)}"
    return DiskFault(f"{problem}.") if is_full(error) else StateError(f"{problem}, or name another --state.dir.")


def _wait_for_ranks(folder: RunFolder) -> None:
    """Wait until no rank of an earlier run is left."""
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
                    raise _in_use(folder, f"remaining ranks of {_owner(folder.lock)}") from error
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
    """The process that a lock file names."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return f"process {int(record['pid'])} on {record['host']}, since {record['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"

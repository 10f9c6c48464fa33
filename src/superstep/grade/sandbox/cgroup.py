"""A cgroup for programs of candidates: the kernel counts all memory that they take, in whatever form they hold it.

version 2   a folder below the nearest one, from our own upward, that gives memory to those below and may be written
version 1   a folder below our own, in the hierarchy of memory and in that of pids

One is made for each process that runs programs. Its owner holds a lock on it, so that others can tell, and remove, one
whose owner was killed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from superstep.grade.sandbox.orphans import kill_each

PREFIX = "superstep-grade-"

EXTRA_BYTES = 16 << 20
"""What an honest program needs besides its memory and its files: page tables, and the sandbox's own processes."""

EXTRA_PROCESSES = 4
"""The sandbox's own."""

GONE_S = 2.0
"""How long processes that were killed may still be in a group."""


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """A version's files of a group.

    Attributes:
        memory: its limit.
        swap: what is written to bound swap; these files are missing where there is no swap.
        events: which has the number of processes that the kernel ended for their memory.
    """

    memory: str
    swap: Callable[[int], dict[str, int]]
    events: str


V1 = CgroupFiles("memory.limit_in_bytes", lambda limit: {"memory.memsw.limit_in_bytes": limit}, "memory.oom_control")
V2 = CgroupFiles("memory.max", lambda limit: {"memory.swap.max": 0, "memory.oom.group": 1}, "memory.events")


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """Where groups can be made.

    Attributes:
        folders: one for version 2; for version 1 that of memory first.
        files: of the version.
    """

    folders: tuple[Path, ...]
    files: CgroupFiles


class Cgroup:
    """A group with a limit. It is removed when nobody has it any more. One program at a time may run in it.

    Attributes:
        folders: of the group, that of memory first.
    """

    def __init__(self, folders: Sequence[Path], locks: Sequence[int], files: CgroupFiles) -> None:
        self.folders = tuple(folders)
        self._files = files
        with ExitStack() as opened:
            self._join: list[int] = []
            for folder in folders:
                self._join.append(os.open(folder / "cgroup.procs", os.O_WRONLY))
                opened.callback(os.close, self._join[-1])
            opened.pop_all()  # all could be opened
        weakref.finalize(self, _remove_own, os.getpid(), self.folders, (*locks, *self._join))

    def join(self) -> None:
        """Takes the process that calls this into the group. It is run between fork and exec, and so does little."""
        for fd in self._join:
            os.write(fd, b"0")

    def kills(self) -> int:
        """How often the kernel ended a process of the group for memory; 0 of a kernel that does not count it (version 1
        before Linux 4.13): looks alone find it there.
        """
        lines = (line.split() for line in (self.folders[0] / self._files.events).read_text().splitlines())
        return next((int(count) for name, count in lines if name == "oom_kill"), 0)

    def kill(self) -> set[int]:
        """Ends what is in the group; which processes that was."""
        told = " ".join((folder / "cgroup.procs").read_text() for folder in self.folders)
        left = set(map(int, told.split())) - {0}  # so one is called that cannot be seen from here
        kill_each(left)
        return left


def make_group(memory_bytes: int, processes: int, uid: int | None) -> Cgroup | None:
    """A group with limits; None where this machine has none, or this user may not make one.

    Args:
        memory_bytes: of a program and of its files together.
        processes: and threads.
        uid: the user that programs run as, where that is another.
    """
    place = find_place()
    if place is None:
        return None
    try:
        group = _make_cgroup(place, memory_bytes + EXTRA_BYTES, processes + EXTRA_PROCESSES)
        # The names may be right and the kernel refuse: where processes may not be moved, say.
        subprocess.run(["/bin/sh", "-c", ":"], user=uid, group=uid, preexec_fn=group.join, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return group


def remove_left_groups() -> None:
    """Removes groups whose owners have ended, unless another process does so, or makes one, for longer than GONE_S."""
    place = find_place()
    if place is None:
        return
    until_s = time.monotonic() + GONE_S
    while True:
        with suppress(OSError), _hold(place.folders[0], fcntl.LOCK_EX | fcntl.LOCK_NB):
            _sweep(place)
            return
        if time.monotonic() >= until_s:
            return
        time.sleep(0.02)


def find_place(proc: Path = Path("/proc/self")) -> CgroupParent | None:
    """Where groups can be made; None where nowhere."""
    own = _own_folders(proc)
    unified = own.get("")
    for folder in () if unified is None else (unified, *unified.parents):
        given = folder / "cgroup.subtree_control"
        if not given.is_file():
            break
        if {"memory", "pids"} <= set(given.read_text().split()) and _may_write(folder):
            return CgroupParent((folder,), V2)
    memory, pids = own.get("memory"), own.get("pids")
    if memory is None or not _may_write(memory):
        return None
    return CgroupParent((memory, pids) if pids is not None and _may_write(pids) else (memory,), V1)


def _may_write(folder: Path) -> bool:
    """Whether groups can be made in a folder, and its processes moved to them."""
    return all(os.access(path, os.W_OK) for path in (folder, folder / "cgroup.procs"))


def _own_folders(proc: Path) -> dict[str, Path]:
    """Our own group's folder in each hierarchy, by the hierarchy's controllers; "" is version 2."""
    mounts = dict(_mounts(proc))
    folders = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            if name in mounts:
                root, mounted = mounts[name]
                # In a container the path may be told from the host's root, or from the container's.
                inner = path.removeprefix(root) if path.startswith(root) else path
                folders[name] = mounted / inner.strip("/")
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def _mounts(proc: Path) -> Iterator[tuple[str, tuple[str, Path]]]:
    """By controller: which part of a hierarchy is mounted, and where. See proc(5) for the form of the file."""
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            yield "", (root, Path(mounted))
        elif kind == "cgroup":
            yield from ((name, (root, Path(mounted))) for name in options.split(","))


def _make_cgroup(place: CgroupParent, memory_bytes: int, processes: int) -> Cgroup:
    """A new group, which is locked before any other process may remove it.

    Raises:
        OSError: it cannot be made, or has no limit of memory.
    """
    name = f"{PREFIX}{secrets.token_hex(8)}"
    folders: list[Path] = []
    locks: list[int] = []
    with _hold(place.folders[0]):
        _sweep(place)
        try:
            for base in place.folders:
                (base / name).mkdir()
                folders.append(base / name)
                locks.append(_open_locked(base / name, fcntl.LOCK_SH))
            (folders[0] / place.files.memory).write_text(str(memory_bytes))
            others = place.files.swap(memory_bytes) | {"pids.max": processes}
            for path in (folder / file for folder in folders for file in others):
                if path.exists():
                    path.write_text(str(others[path.name]))
            return Cgroup(folders, locks, place.files)
        except OSError:
            _remove(folders, locks)
            raise


def _sweep(place: CgroupParent) -> None:
    """Removes groups that nobody holds a lock on."""
    for base in place.folders:
        for folder in base.glob(f"{PREFIX}*"):
            with suppress(OSError):
                _remove([folder], [_open_locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)])


def _remove_own(owner: int, folders: Sequence[Path], fds: Sequence[int]) -> None:
    """Removes a group at the end of the process that made it, but not at that of its forks."""
    if os.getpid() == owner:
        _remove(folders, fds)


def _remove(folders: Sequence[Path], fds: Sequence[int]) -> None:
    """Removes groups once their processes, which were killed, are gone; one that stays is left to the next owner."""
    until_s = time.monotonic() + GONE_S
    for folder in folders:
        while folder.exists() and time.monotonic() < until_s:
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.02)
    for fd in fds:
        os.close(fd)


@contextmanager
def _hold(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """While no other process makes or removes groups below a folder."""
    fd = _open_locked(folder, how)
    try:
        yield
    finally:
        os.close(fd)


def _open_locked(folder: Path, how: int) -> int:
    """An open folder with a lock on it.

    Raises:
        OSError: somebody else has it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, how)
    except OSError:
        os.close(fd)
        raise
    return fd

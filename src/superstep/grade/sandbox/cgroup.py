"""Cgroups for candidates' programs: the kernel counts all memory of a program.

version 2   a folder below the nearest cgroup, from our own upward, that is writable and delegates memory
version 1   a folder below our own, in the memory and the pids hierarchies

Each process that runs programs makes one group. It holds a lock on the group, so that others can remove the groups of
killed owners.
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
"""Memory beyond a program's limit and its files: page tables and the sandbox's own processes."""

EXTRA_PROCESSES = 4
"""Processes of the sandbox itself."""

GONE_S = 2.0
"""Seconds that killed processes may stay in a group."""


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """A version's files of a group.

    Attributes:
        memory: the memory limit.
        swap: writes that limit swap; the files are missing where there is no swap.
        events: holds the number of processes that the kernel killed for memory.
    """

    memory: str
    swap: Callable[[int], dict[str, int]]
    events: str


V1 = CgroupFiles("memory.limit_in_bytes", lambda limit: {"memory.memsw.limit_in_bytes": limit}, "memory.oom_control")
V2 = CgroupFiles("memory.max", lambda limit: {"memory.swap.max": 0, "memory.oom.group": 1}, "memory.events")


@dataclass(frozen=True, slots=True)
class CgroupParent:
    """Where groups can be made. ``folders``: one for version 2; two for version 1, memory first."""

    folders: tuple[Path, ...]
    files: CgroupFiles


class Cgroup:
    """A group with a limit for one program at a time. It is removed when its owner ends. ``folders``: the group's
    folders, memory first.
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
        """Move the calling process into the group. It runs between fork and exec, so it does little."""
        for fd in self._join:
            os.write(fd, b"0")

    def kills(self) -> int:
        """How often the kernel killed a process of the group for memory; always 0 for version 1 before Linux 4.13,
        where only polling finds it.
        """
        lines = (line.split() for line in (self.folders[0] / self._files.events).read_text().splitlines())
        return next((int(count) for name, count in lines if name == "oom_kill"), 0)

    def kill(self) -> set[int]:
        """Kill the processes of the group; returns their ids."""
        ids_text = " ".join((folder / "cgroup.procs").read_text() for folder in self.folders)
        left = set(map(int, ids_text.split())) - {0}  # so one is called that cannot be seen from here
        kill_each(left)
        return left


def make_group(memory_bytes: int, processes: int, uid: int | None) -> Cgroup | None:
    """Make a group with limits; None where this machine or this user cannot.

    Args:
        memory_bytes: of a program and its files together.
        processes: processes and threads.
        uid: the programs' user, where it differs from ours.
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
    """Remove groups without owners, unless another process holds the folder's lock for longer than GONE_S."""
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
    """Our own group's folder in each hierarchy, by controller; "" is version 2."""
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
    """By controller: the mounted part of its hierarchy, and the mount point. The file's format is in proc(5)."""
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            yield "", (root, Path(mounted))
        elif kind == "cgroup":
            yield from ((name, (root, Path(mounted))) for name in options.split(","))


def _make_cgroup(place: CgroupParent, memory_bytes: int, processes: int) -> Cgroup:
    """Make a group and lock it before another process can remove it. Raises OSError where it cannot be made, or memory
    cannot be limited.
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
    for base in place.folders:
        for folder in base.glob(f"{PREFIX}*"):
            with suppress(OSError):
                _remove([folder], [_open_locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)])


def _remove_own(owner: int, folders: Sequence[Path], fds: Sequence[int]) -> None:
    """Remove a group at the end of the process that made it, but not at the end of its forks."""
    if os.getpid() == owner:
        _remove(folders, fds)


def _remove(folders: Sequence[Path], fds: Sequence[int]) -> None:
    """Remove groups once their killed processes are gone; a group that stays is left to the next owner."""
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
    """Lock a folder, so that no other process makes or removes groups below it."""
    fd = _open_locked(folder, how)
    try:
        yield
    finally:
        os.close(fd)


def _open_locked(folder: Path, how: int) -> int:
    """Open a folder and lock it; raises OSError where another process holds the lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, how)
    except OSError:
        os.close(fd)
        raise
    return fd

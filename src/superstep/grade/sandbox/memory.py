"""The memory of a program's processes, measured from outside.

This measure is the limit where no cgroup can be made, so it must count every kind of memory. The rest is refused by the
seccomp filter or small: page tables of addressed but untouched memory, pipes (64 MiB for each user), and the kernel's
records of mappings (16 MiB for each process).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:")
"""Fields of ``/proc/PID/status``: private and shared memory, swap, page tables."""

SOCKET_SYSCTL = Path("/proc/sys/net/core/wmem_default")
"""Bytes that a socket may hold unread."""

NAME_BYTES = 2048
"""Memory of an empty file: its inode, and a name of 255 characters."""


def resident_bytes(pid: int) -> int:
    """Private and shared memory of a process and all below it, in bytes.

    Shared memory is counted for each process: the limit is reached a little early rather than too late.
    """
    return sum(map(_own_bytes, tree(pid)))


def count_boxed_bytes(pid: int, folder: str) -> int:
    """Memory of a sandbox's processes, its sockets and its files in the kernel, in bytes.

    Args:
        pid: the process that made the sandbox, outside of it.
        folder: mounted inside, in memory.
    """
    pids = list(tree(pid))
    total = sum(map(_own_bytes, pids))
    if len(pids) > 1:
        total += _socket_bytes(pids[1]) + _name_bytes(pids[1], folder)
    return total


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        with suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                waiting += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())


def _own_bytes(pid: int) -> int:
    """Read from a thread that still has the process's memory: the main thread may have ended before the others."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/task/{task}/status").read_text(errors="replace").splitlines()
                counted = [1024 * int(line.split()[1]) for line in lines if line.startswith(COUNTED)]
                if counted:
                    return sum(counted)
    return 0


def _socket_bytes(pid: int) -> int:
    """The most that the sockets of a process's network hold: twice each limit, as the last message may exceed it."""
    with suppress(OSError):
        used = Path(f"/proc/{pid}/net/sockstat").read_text().split()[2]
        return 2 * int(used) * int(SOCKET_SYSCTL.read_text())
    return 0


def _name_bytes(pid: int, folder: str) -> int:
    """Memory of a folder's files without their content, where the folder is a mount of its own."""
    inside = f"/proc/{pid}/root{folder}"
    with suppress(OSError):
        if os.stat(inside).st_dev != os.stat(folder).st_dev:
            status = os.statvfs(inside)
            return NAME_BYTES * (status.f_files - status.f_ffree)
    return 0

"""How much memory a program's processes have taken, as seen from outside.

It is what a bound is held to where no cgroup can be made, so nothing that a program can take may be left out. What is
not seen here is refused by the filter of calls, or small: page tables of what is addressed and not touched, pipes (64
MiB for all of a user's), and the kernel's records of mappings (16 MiB a process).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:")
"""Of a process, in ``/proc/PID/status``: what it has to itself or shares, what was swapped out, and its page tables."""

SOCKET_SYSCTL = Path("/proc/sys/net/core/wmem_default")
"""Bytes that a socket may have sent and nobody has read."""

NAME_BYTES = 2048
"""Of a file without content: its inode, and a name of 255 characters."""


def resident_bytes(pid: int) -> int:
    """The memory that a process and all below it have to themselves, or share with each other.

    What is shared is counted for each of them: a bound is passed a little early rather than not at all.
    """
    return sum(map(_own_bytes, tree(pid)))


def boxed_bytes(pid: int, folder: str) -> int:
    """The same of the processes of a sandbox, with what its sockets and its files may keep in the kernel.

    Args:
        pid: of the process that made the sandbox, and is not in it.
        folder: that is mounted inside, in memory.
    """
    pids = list(tree(pid))
    total = sum(map(_own_bytes, pids))
    if len(pids) > 1:
        total += _socket_bytes(pids[1]) + _name_bytes(pids[1], folder)
    return total


def tree(pid: int) -> Iterator[int]:
    """A process and all below it, as far as they are there."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        with suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                waiting += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())


def _own_bytes(pid: int) -> int:
    """By the first thread that still has the process's memory: the one that began may have ended before the others."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/task/{task}/status").read_text(errors="replace").splitlines()
                counted = [1024 * int(line.split()[1]) for line in lines if line.startswith(COUNTED)]
                if counted:
                    return sum(counted)
    return 0


def _socket_bytes(pid: int) -> int:
    """What all sockets of a process's network may hold: twice what each may send, for the last message may go over."""
    with suppress(OSError):
        used = Path(f"/proc/{pid}/net/sockstat").read_text().split()[2]
        return 2 * int(used) * int(SOCKET_SYSCTL.read_text())
    return 0


def _name_bytes(pid: int, folder: str) -> int:
    """What the files of a folder take without their content, once the folder is another one than ours."""
    inside = f"/proc/{pid}/root{folder}"
    with suppress(OSError):
        if os.stat(inside).st_dev != os.stat(folder).st_dev:
            status = os.statvfs(inside)
            return NAME_BYTES * (status.f_files - status.f_ffree)
    return 0

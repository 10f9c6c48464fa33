"""Processes that outlive who started them: ended and waited for by the process that grades, who adopts them.

Else that is the machine's first process, which in a container may wait for nobody. Who is not waited for counts against
the bound of processes of the next program; and who is, has given back its memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of all below it whose own parent has ended; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """The processes that this one waits for, or is to."""
    told = ""
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # of a thread that has just ended
            told += path.read_text()
    return set(map(int, told.split()))


def end_each(pids: Iterable[int]) -> set[int]:
    """End some children, and wait for those that have ended; which have not yet. The first process of a sandbox ends
    once all others of it have.
    """
    left = set(pids)
    kill_each(left)
    for pid in tuple(left):
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                left.remove(pid)
    return left


def kill_each(pids: Iterable[int]) -> None:
    """SIGKILL to each that is there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)

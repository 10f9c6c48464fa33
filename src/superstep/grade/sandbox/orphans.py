"""Processes that outlive their parent: the grading process adopts them, ends them and waits for them.

Otherwise the machine's first process would adopt them, and in a container that one may wait for nobody. A process that
nobody waits for counts against the process limit of the next program and keeps its memory.
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
    """Make this process adopt orphans among its descendants; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """The process ids of this process's children."""
    ids_text = ""
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # of a thread that has just ended
            ids_text += path.read_text()
    return set(map(int, ids_text.split()))


def end_each(pids: Iterable[int]) -> set[int]:
    """Kill some children and reap those that have ended; returns the others. The first process of a sandbox ends after
    all others of it.
    """
    left = set(pids)
    kill_each(left)
    for pid in tuple(left):
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                left.remove(pid)
    return left


def kill_each(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)

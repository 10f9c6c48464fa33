"""Finds processes that a signal has stopped.

A stopped process (SIGSTOP, Ctrl-Z) is not dead: its connections stay, so others wait for it until some time limit. The
system knows at once. A slow or busy process is never taken for stopped: only the system's state of the process counts.
A process in a debugger does not count as stopped either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from superstep.monitor.procfs import stat_in

LOOK_S = 0.25
"""Seconds between looks, so that a stopped process is reported within three seconds."""

STOPPED_S = 0.75
"""Seconds that it must be stopped. Ctrl-Z and ``fg`` reach the processes of a terminal one after the other."""


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped a process; False without /proc."""
    try:
        state = stat_in(Path(f"/proc/{process}"))[0]
    except OSError:
        return False
    return state == b"T"


class ProcessWatch:
    """Looks at some processes repeatedly."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._stopped_s: dict[int, float] = {}

    def look(self, processes: Iterable[int]) -> int | None:
        """The first process that has been stopped for STOPPED_S.

        Time in which this process did not run does not count: it may have been stopped with the others.
        """
        now_s = self._clock()
        passed_s, self._looked_s = min(now_s - self._looked_s, LOOK_S), now_s
        before = self._stopped_s
        self._stopped_s = {
            process: before[process] + passed_s if process in before else 0.0
            for process in processes
            if is_stopped(process)
        }
        return next((process for process, stopped_s in self._stopped_s.items() if stopped_s >= STOPPED_S), None)

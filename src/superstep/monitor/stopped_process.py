"""Which of some processes were stopped by a signal, and have not gone on.

A stopped process (SIGSTOP, Ctrl-Z) is not dead: its connections stay and nobody is told, so that who waits for it waits
until some time limit has passed. The system knows at once. Who is merely slow, or computes, is never taken for stopped:
what is looked at is the state that the system gives the process, and no clock of its own.

A process that a debugger holds is not stopped: somebody is looking at it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from superstep.monitor.procfs import stat_in

LOOK_S = 0.25
"""How often it is looked, so that a stopped process is named within three seconds together with the end of the rest."""

STOPPED_S = 0.75
"""How long it must have been stopped. Ctrl-Z and ``fg`` reach the processes of a terminal one after the other."""


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped a process. Of a system without /proc nothing is known."""
    try:
        state = stat_in(Path(f"/proc/{process}"))[0]
    except OSError:
        return False
    return state == b"T"


class Pulse:
    """Looks at some processes again and again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._stopped_s: dict[int, float] = {}

    def look(self, processes: Iterable[int]) -> int | None:
        """The first of them that has been stopped for STOPPED_S.

        Time in which this process did not look does not count: it may have been stopped with the others.
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

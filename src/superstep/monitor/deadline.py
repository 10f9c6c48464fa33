"""A deadline that counts only the time in which this process could have acted on it.

A laptop that sleeps, a virtual machine that is moved, and a process that is stopped all see the clock jump. What it
jumps by is no fault of a candidate, and a timeout would be a wrong grade. So who waits looks at the clock every STEP_S,
and more than LONGEST_S between two looks does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_S = 0.1
LONGEST_S = 0.5


class ActiveDeadline:
    """So many seconds, which are used up as ``left`` is asked."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock = seconds, clock
        self._looked = clock()

    @property
    def is_over(self) -> bool:
        """Whether nothing was left at the last look."""
        return self._left <= 0

    def left(self) -> float:
        """The seconds that are left; 0 or less where there are none."""
        now = self._clock()
        self._left -= min(now - self._looked, LONGEST_S)
        self._looked = now
        return self._left

    def step(self) -> float:
        """How long to wait before the next look; 0 at the end."""
        return max(0.0, min(STEP_S, self.left()))

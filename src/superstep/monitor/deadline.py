"""A deadline that counts only time in which this process could act.

The clock jumps when a laptop sleeps, a virtual machine moves, or a process is stopped. A timeout then would be a wrong
grade. So waiting code looks at the clock every STEP_S, and more than LONGEST_S between two looks does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_S = 0.1
LONGEST_S = 0.5


class ActiveDeadline:
    """A number of seconds, which calls of ``left`` use up."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock = seconds, clock
        self._looked = clock()

    @property
    def is_over(self) -> bool:
        """Whether nothing was left at the last look."""
        return self._left <= 0

    def left(self) -> float:
        """The seconds left; 0 or less at the end."""
        now = self._clock()
        self._left -= min(now - self._looked, LONGEST_S)
        self._looked = now
        return self._left

    def step(self) -> float:
        """Seconds until the next look; 0 at the end."""
        return max(0.0, min(STEP_S, self.left()))

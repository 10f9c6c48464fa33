"""When checkpoints are due, and what follows a failed one: the run trains on, and saves again soon.

save_every = 200, save_patience = 3

step 200 is not saved ── the run trains on ── saves again about 30 s later ── ... ── step 600 fails too: it ends
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from superstep.errors import DiskFault
from superstep.observe.events import Warned

T = TypeVar("T")

AGAIN_S = 30.0
"""Seconds of training before a failed save is retried."""

PAUSES_S = (1.0, 5.0, 15.0)
"""Pauses between retries of the last possible save."""


class SaveSchedule:
    """The schedule of saves, equal on every rank.

    Args:
        every: steps between checkpoints.
        patience: multiples of ``every`` that the newest checkpoint may be old.
    """

    def __init__(self, every: int, patience: int) -> None:
        self._every = every
        self._most_steps = patience * every
        self._newest = 0
        self._again: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint follows a step."""
        return step % self._every == 0 or step == self._again

    def note_saved(self, step: int) -> None:
        """Record a saved step."""
        self._newest, self._again = step, None

    def is_too_old(self, step: int) -> bool:
        """Whether the run must end if this step cannot be saved."""
        return step - self._newest >= self._most_steps

    def try_again(self, step: int, step_s: float | None) -> int:
        """Schedule the retry of a failed checkpoint; the step that it follows.

        Args:
            step: that was not saved.
            step_s: seconds of a step, if known.
        """
        regular = step + self._every - step % self._every
        soon = regular if step_s is None else step + max(1, math.ceil(AGAIN_S / max(step_s, 1e-6)))
        self._again = min(regular, soon)
        return self._again


def attempt(
    saves: SaveSchedule,
    step: int,
    write: Callable[[], T],
    report: Callable[[Warned], None],
    *,
    is_last: bool,
    step_s: Callable[[], float | None] = lambda: None,
) -> T | None:
    """Save the state after a step. Every rank calls this together.

    Args:
        saves: the schedule.
        step: finished steps.
        write: writes it; raises the same on every rank.
        report: receives warnings.
        is_last: whether the run ends here.
        step_s: seconds of a step; the same on every rank.

    Returns:
        The result of ``write``; None if the disk failed and the run trains on.

    Raises:
        DiskFault: the disk failed repeatedly, and the run ends here or the newest checkpoint is too old.
    """
    pauses_s = iter(PAUSES_S)
    while True:
        try:
            written = write()
        except DiskFault as fault:
            if not is_last and not saves.is_too_old(step):
                again = saves.try_again(step, step_s())
                report(Warned(step=step, text=f"{fault} Training continues and saves again after step {again}."))
                return None
            pause_s = next(pauses_s, None)
            if pause_s is None:
                raise
            report(Warned(step=step, text=f"{fault} The next attempt is in {pause_s:g} s."))
            time.sleep(pause_s)
        else:
            saves.note_saved(step)
            return written

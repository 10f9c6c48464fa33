"""State of a run from its events."""

from __future__ import annotations

from collections import deque

from superstep.cli.train.downsample import Curve
from superstep.observe.events import (
    Evaluated,
    Event,
    Goodput,
    Retried,
    RolledBack,
    RolloutStats,
    RouterStats,
    RunFinished,
    RunStarted,
    RunStopped,
    Saved,
    StepDone,
    Warned,
)


class Progress:
    """The events so far, reduced to the latest of each kind and the course of the loss."""

    def __init__(self, *, mfu_convention: str) -> None:
        """``mfu_convention`` says in a few words what the MFU counts."""
        self.mfu_convention = mfu_convention
        self.started: RunStarted | None = None
        self.step: StepDone | None = None
        self.routers: RouterStats | None = None
        self.rolled: RolloutStats | None = None
        self.retried: Retried | None = None
        self.evaluated: Evaluated | None = None
        self.saved: Saved | None = None
        self.warned: Warned | None = None
        self.goodput: Goodput | None = None
        self.finished: RunFinished | None = None
        self.stopped: RunStopped | None = None
        self.losses = Curve()
        self._arrived_s = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=100)

    def add(self, event: Event, now: float) -> None:
        """Add an event that arrived at ``now``, in seconds of any monotonic clock."""
        match event:
            case RunStarted():
                self.started, self._arrived_s = event, now
            case StepDone():
                self.step, self._arrived_s = event, now
                self.losses.add(event.loss)
                self._recent.append((event.step, event.elapsed_s))
            case RouterStats():
                self.routers = event
            case RolloutStats():
                self.rolled = event
            case Retried():
                self.retried = event
            case Evaluated():
                self.evaluated = event
            case Saved() | Warned():
                self._add_of_disk(event)
            case RunFinished():
                self.finished = event
            case RunStopped():
                self.stopped = event
            case RolledBack():
                self._recent.clear()
            case Goodput():
                self.goodput = event
            case _:
                pass

    def _add_of_disk(self, event: Saved | Warned) -> None:
        match event:
            case Saved():
                self.saved = event
            case Warned():
                self.warned = event

    @property
    def steps(self) -> int:
        """Steps of the whole run; 0 before it has started."""
        return self.started.steps if self.started else 0

    def elapsed_s(self, now: float) -> float:
        """Seconds of training; the clock goes on between two steps."""
        if ended := self.finished or self.stopped:
            return ended.elapsed_s
        if not self.started and not self.step:
            return 0.0
        return (self.step.elapsed_s if self.step else 0.0) + now - self._arrived_s

    def left_s(self, now: float) -> float | None:
        """Seconds to the last step, at the pace of the last hundred steps with everything in between."""
        if self.finished:
            return 0.0
        if len(self._recent) < 2:
            return None
        (first, began_s), (last, ended_s) = self._recent[0], self._recent[-1]
        pace_s = (ended_s - began_s) / (last - first)
        return max(0.0, (self.steps - last) * pace_s - (now - self._arrived_s))

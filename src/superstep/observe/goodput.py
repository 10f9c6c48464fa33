"""Goodput: the share of a run's time in steps that count, counted from its events.

    ETTR = seconds of steps that stand / seconds since the first start

A step stands until the run goes back before it. The rest is: starts, validation, waits for checkpoints, repeated steps,
and the time until a loss was noticed and recovered. Time in which the run did not run does not count. (Kokolis 2024
also counts the wait in a queue, which a run does not know.)
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from pathlib import Path

from superstep.observe.events import (
    Evaluated,
    Event,
    Goodput,
    Resumed,
    RolledBack,
    RunFinished,
    RunStopped,
    Saved,
    Sink,
    StepDone,
)
from superstep.observe.jsonl import read


class StepSeconds:
    """Seconds of steps; a rollback may drop the last ones."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._seconds = array("d")

    def add(self, step: int, seconds: float) -> None:
        self._steps.append(step)
        self._seconds.append(seconds)

    def drop_after(self, step: int) -> None:
        """Drop later steps: the run went back."""
        while self._steps and self._steps[-1] > step:
            self._steps.pop()
            self._seconds.pop()

    def total(self) -> float:
        return sum(self._seconds)


class GoodputSink:
    """A sink that adds a ``Goodput`` to the events that it passes on, after each checkpoint and before the end.

    Args:
        metrics: the run's earlier events; read here, before any line is dropped.
        began_at_s: this launch's begin, in seconds since 1970; replaced ranks continue from it.
        earlier_s: seconds of earlier launches.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        sink: Sink,
        metrics: Path,
        *,
        began_at_s: float,
        earlier_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sink = sink
        self._began_at_s = began_at_s
        self._earlier_s = earlier_s
        self._clock = clock
        self._steps, self._validation = StepSeconds(), StepSeconds()
        for line in read(metrics) if metrics.exists() else ():
            match line.get("event"):
                case "step":
                    self._steps.add(line["step"], line["step_s"])
                case "evaluated":
                    self._validation.add(line["step"], line["seconds"])

    def write(self, event: Event) -> None:
        """Count, and pass on."""
        match event:
            case StepDone():
                self._steps.add(event.step, event.step_s)
            case Evaluated():
                self._validation.add(event.step, event.seconds)
            case Resumed() | RolledBack():
                self._steps.drop_after(event.step)
                self._validation.drop_after(event.step)
            case RunFinished() | RunStopped():
                self._sink.write(self.goodput(event.step))
            case _:
                pass
        self._sink.write(event)
        if isinstance(event, Saved):
            self._sink.write(self.goodput(event.step))

    def close(self) -> None:
        self._sink.close()

    def goodput(self, step: int) -> Goodput:
        now_s = self._clock()
        wall_s = self._earlier_s + now_s - self._began_at_s
        steps_s = self._steps.total()
        return Goodput(
            step=step,
            ettr=min(1.0, steps_s / wall_s) if wall_s > 0 else 0.0,
            wall_s=wall_s,
            steps_s=steps_s,
            validation_s=self._validation.total(),
            at_s=now_s,
        )


def sum_spent_s(metrics: Path) -> float:
    """Seconds of a run's earlier launches, as far as its metrics tell: until their last lines."""
    if not metrics.exists():
        return 0.0
    lines = [line for line in read(metrics) if line.get("event") in ("goodput", "step")]
    counted = [line for line in lines if line["event"] == "goodput"]
    if counted:
        return float(counted[-1]["wall_s"]) + max(0.0, metrics.stat().st_mtime - float(counted[-1]["at_s"]))
    return float(lines[-1]["elapsed_s"]) if lines else 0.0

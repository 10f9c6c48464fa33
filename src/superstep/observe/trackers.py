"""Third-party trackers: Weights & Biases, MLflow, trackio, each through its own client.

    event ──scalars──► Tracked.write ──queue──► a thread ──► Tracker.log

A slow tracker does not delay a run, and a failed one does not end it: events go into a queue that a thread empties; the
first error is reported once, and nothing more is sent. The run's own files have everything in any case. This module
imports no client: each adapter receives its module.
"""

from __future__ import annotations

import contextlib
import io
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from superstep.observe.events import Event
from superstep.observe.metric_names import Scalars, scalars

LEAVING_S = 30.0
"""Seconds that the end of a run waits for a tracker's queue."""

MOST_WAITING = 100_000
"""The most steps in the queue of a slow tracker; newer ones are dropped."""


class Tracker(Protocol):
    """A tracker's client, with an open run."""

    def log(self, steps: Sequence[Scalars]) -> None:
        """Send the points."""

    def finish(self) -> None:
        """The run has ended."""

    @property
    def run(self) -> str:
        """The tracker's id of this run, to continue it later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker receives of a run.

    Attributes:
        run: the tracker's id of a run that continues; None for a new one.
        settings: by dotted name.
        folder: of the run, for the client's files.
    """

    project: str
    name: str
    run: str | None
    settings: Mapping[str, object]
    folder: str


class Wandb:
    """Weights & Biases. The step is a value of its own, so that a run that goes back may report a step again."""

    def __init__(self, wandb: Any, run: TrackedRun) -> None:  # noqa: ANN401
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run,
            resume="allow",
            dir=run.folder,
            config=dict(run.settings),
            # The terminal is the run's own.
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    @property
    def run(self) -> str:
        return str(self._run.id)

    def log(self, steps: Sequence[Scalars]) -> None:
        for one in steps:
            self._run.log({"step": one.step, **one.points})

    def finish(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow, with its full or skinny client; a project is an experiment."""

    MOST_METRICS, MOST_PARAMETERS = 1000, 100
    """The most in one request."""

    def __init__(self, mlflow: Any, run: TrackedRun) -> None:  # noqa: ANN401
        self._entities, self._client = mlflow.entities, mlflow.MlflowClient()
        if run.run is None:
            known = self._client.get_experiment_by_name(run.project)
            experiment = self._client.create_experiment(run.project) if known is None else known.experiment_id
            self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
            given = [mlflow.entities.Param(key, str(value)[:500]) for key, value in run.settings.items()]
            for first in range(0, len(given), self.MOST_PARAMETERS):
                self._client.log_batch(self._id, params=given[first : first + self.MOST_PARAMETERS])
        else:
            self._id = run.run
            self._client.update_run(run.run, status="RUNNING")

    @property
    def run(self) -> str:
        return self._id

    def log(self, steps: Sequence[Scalars]) -> None:
        now_ms = int(1e3 * time.time())
        points = [self._entities.Metric(key, v, now_ms, one.step) for one in steps for key, v in one.points.items()]
        for first in range(0, len(points), self.MOST_METRICS):
            self._client.log_batch(self._id, metrics=points[first : first + self.MOST_METRICS])

    def finish(self) -> None:
        """End the run in MLflow."""
        self._client.set_terminated(self._id)


class Trackio:
    """trackio; its runs are known by their names."""

    def __init__(self, trackio: Any, run: TrackedRun) -> None:  # noqa: ANN401
        self.run = run.run or f"{run.name}-{int(time.time())}"
        with _quiet():
            self._run = trackio.init(
                project=run.project, name=self.run, config=dict(run.settings), resume="allow", embed=False
            )

    def log(self, steps: Sequence[Scalars]) -> None:
        for one in steps:
            self._run.log(one.points, step=one.step)

    def finish(self) -> None:
        """Wait until all is sent."""
        with _quiet():
            self._run.finish()


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Hide what a client prints: the terminal is the run's own."""
    return contextlib.redirect_stdout(io.StringIO())


class TrackerSink:
    """The sink for a tracker.

    Args:
        warn: called once, when the tracker has failed.
        leaving_s: the longest wait of ``close``.
    """

    def __init__(
        self, name: str, tracker: Tracker, warn: Callable[[str], None], *, leaving_s: float = LEAVING_S
    ) -> None:
        self._name, self._tracker, self._warn, self._leaving_s = name, tracker, warn, leaving_s
        self._waiting: queue.Queue[Scalars | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._send, name=f"superstep-{name}", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Queue the event's points."""
        if (values := scalars(event)) is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(values)

    def close(self) -> None:
        """Wait for the queue, for a while."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=self._leaving_s)
        self._thread.join(self._leaving_s)
        if self._thread.is_alive():
            self._warn(f"{self._name} has not taken all within {self._leaving_s:.0f} s; metrics.jsonl has it")

    def _send(self) -> None:
        try:
            is_over = False
            while not is_over:
                steps, is_over = self._come()
                if steps:
                    self._tracker.log(steps)
            self._tracker.finish()
        except Exception as error:  # noqa: BLE001  whatever a client raises, the run goes on
            self._warn(f"{self._name} has failed, and is told nothing more: {str(error).partition(chr(10))[0]}")

    def _come(self) -> tuple[list[Scalars], bool]:
        """All queued points, once there are any, and whether they are the last."""
        steps = [self._waiting.get()]
        with contextlib.suppress(queue.Empty):
            while steps[-1] is not None:
                steps.append(self._waiting.get_nowait())
        return [one for one in steps if one is not None], steps[-1] is None

"""Trackers of others beside our own files: Weights & Biases, MLflow, trackio. Each is asked through its own client.

    event ──scalars──► Tracked.write ──queue──► a thread ──► Tracker.log

A run is not kept by a tracker that is slow, and not ended by one that fails: what it tells goes into a queue, from
which a thread of its own sends; the first error is told once, and nothing is sent any more. The run's own files have
everything in any case.

This module imports no client: each adapter is given its module, by whoever was asked for it.
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
"""How long the end of a run waits for what a tracker has still to send."""

MOST_WAITING = 100_000
"""Points' steps that may wait for a tracker that is slower than the run; newer ones are left out."""


class Tracker(Protocol):
    """A client of a tracker, with a run of it open."""

    def log(self, steps: Sequence[Scalars]) -> None:
        """Send the points."""

    def finish(self) -> None:
        """The run has come to its end, here."""

    @property
    def run(self) -> str:
        """By which the tracker knows this run, and goes on with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run.

    Attributes:
        project: that it is of.
        name: of the run.
        run: by which the tracker knows it, where it goes on; None where it begins.
        settings: of the run, by dotted name.
        folder: of the run, for what a client keeps there.
    """

    project: str
    name: str
    run: str | None
    settings: Mapping[str, object]
    folder: str


class Wandb:
    """Weights & Biases. Steps are a value of their own: who goes back to a step may tell of it again.

    Args:
        wandb: the module.
        run: what it is told of the run.
    """

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
        """Its id."""
        return str(self._run.id)

    def log(self, steps: Sequence[Scalars]) -> None:
        """Send the points."""
        for one in steps:
            self._run.log({"step": one.step, **one.points})

    def finish(self) -> None:
        """Wait until all is sent."""
        self._run.finish()


class Mlflow:
    """MLflow, its full client or the skinny one; a project is an experiment. Arguments are those of ``Wandb``."""

    MOST_METRICS, MOST_PARAMETERS = 1000, 100
    """Of one request."""

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
        """Its id."""
        return self._id

    def log(self, steps: Sequence[Scalars]) -> None:
        """Send the points."""
        now_ms = int(1e3 * time.time())
        points = [self._entities.Metric(key, v, now_ms, one.step) for one in steps for key, v in one.points.items()]
        for first in range(0, len(points), self.MOST_METRICS):
            self._client.log_batch(self._id, metrics=points[first : first + self.MOST_METRICS])

    def finish(self) -> None:
        """Say that the run has ended."""
        self._client.set_terminated(self._id)


class Trackio:
    """trackio. Arguments are those of ``Wandb``; a run is known by its name."""

    def __init__(self, trackio: Any, run: TrackedRun) -> None:  # noqa: ANN401
        self.run = run.run or f"{run.name}-{int(time.time())}"
        with _quiet():
            self._run = trackio.init(
                project=run.project, name=self.run, config=dict(run.settings), resume="allow", embed=False
            )

    def log(self, steps: Sequence[Scalars]) -> None:
        """Send the points."""
        for one in steps:
            self._run.log(one.points, step=one.step)

    def finish(self) -> None:
        """Wait until all is sent."""
        with _quiet():
            self._run.finish()


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """What a client prints is not seen: the terminal is the run's own."""
    return contextlib.redirect_stdout(io.StringIO())


class Tracked:
    """The sink that sends to a tracker.

    Args:
        name: of the tracker.
        tracker: the client.
        warn: told, once, that it has failed.
        leaving_s: how long ``close`` waits for it.
    """

    def __init__(
        self, name: str, tracker: Tracker, warn: Callable[[str], None], *, leaving_s: float = LEAVING_S
    ) -> None:
        self._name, self._tracker, self._warn, self._leaving_s = name, tracker, warn, leaving_s
        self._waiting: queue.Queue[Scalars | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._send, name=f"superstep-{name}", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Have the event's points sent."""
        if (values := scalars(event)) is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(values)

    def close(self) -> None:
        """Wait for what is still to be sent, for a while."""
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
        """All that waits, once there is something; and whether that was the last."""
        steps = [self._waiting.get()]
        with contextlib.suppress(queue.Empty):
            while steps[-1] is not None:
                steps.append(self._waiting.get_nowait())
        return [one for one in steps if one is not None], steps[-1] is None

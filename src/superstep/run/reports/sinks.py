"""Sinks of a run's events: its own files, the display, and experiment trackers if configured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from superstep.errors import ConfigError
from superstep.observe.events import Sink
from superstep.observe.jsonl import JsonLines
from superstep.observe.tensorboard import TensorBoard
from superstep.observe.trackers import Mlflow, TrackedRun, Tracker, TrackerSink, Trackio, Wandb
from superstep.plan.config import RunConfig
from superstep.plan.observe import ObserveConfig
from superstep.run.reports.report import ReportAtEnd, flat
from superstep.train.run_folder.run_paths import RunFolder, write_whole

WAITING_BYTES = 2**22
"""Largest backlog of events for a slow disk: about ten thousand steps."""

Opens = Callable[[Any, TrackedRun], Tracker]
CLIENTS: dict[str, tuple[Opens, str]] = {
    "wandb": (Wandb, "wandb"),
    "mlflow": (Mlflow, "mlflow-skinny"),
    "trackio": (Trackio, "trackio"),
}
"""Each tracker's adapter, and the package of its client."""


def require_trackers(observe: ObserveConfig) -> None:
    """Check that the configured trackers' clients are installed.

    Raises:
        ConfigError: one is not; names the command that installs it.
    """
    for name in observe.trackers:
        if find_spec(name) is None:
            raise ConfigError(
                f"observe.trackers has '{name}', whose client is not installed: pip install {CLIENTS[name][1]}; or "
                "leave it out."
            )


def open_trackers(config: RunConfig, folder: RunFolder) -> dict[str, Tracker]:
    """Open a run in each configured tracker; the earlier launch's, if the run resumes.

    Raises:
        ConfigError: a client refuses.
    """
    known = json.loads(folder.trackers.read_text(encoding="utf-8")) if folder.trackers.is_file() else {}
    settings = flat("", asdict(config))
    opened: dict[str, Tracker] = {}
    for name in config.observe.trackers:
        tracked = TrackedRun(
            project=config.observe.project,
            name=folder.root.name,
            run=known.get(name),
            settings=settings,
            folder=str(folder.root),
        )
        try:
            opened[name] = CLIENTS[name][0](import_module(name), tracked)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"observe.trackers: {name} cannot begin a run ({reason}); fix its own settings, or leave it out."
            ) from error
    return opened


def sinks(
    observe: ObserveConfig, folder: RunFolder, display: Sink, trackers: dict[str, Tracker], warn: Callable[[str], None]
) -> Sequence[Sink]:
    """The sinks of a run with a written folder. The last one makes the page from the others' files.

    Args:
        observe: the run's settings.
        folder: of the run.
        display: shows events to the user.
        trackers: the open ones.
        warn: receives a line about a failed write.
    """
    written: list[Sink] = [JsonLines(folder.metrics, most_waiting_bytes=WAITING_BYTES, warn=warn), display]
    if observe.tensorboard:
        written.append(TensorBoard(folder.tensorboard, most_waiting_bytes=WAITING_BYTES))
    if trackers:
        write_whole(folder.trackers, json.dumps({name: tracker.run for name, tracker in trackers.items()}))
    written += [TrackerSink(name, tracker, warn) for name, tracker in trackers.items()]
    return [*written, ReportAtEnd(folder)]

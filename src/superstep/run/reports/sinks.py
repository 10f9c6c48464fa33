"""Where the events of a run go: its own files, the display, and trackers of others where they are asked for."""

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
from superstep.plan.config import ObserveConfig, RunConfig
from superstep.run.reports.report import ReportAtEnd, flat
from superstep.train.run_folder.run_paths import RunFolder, write_whole

WAITING_BYTES = 2**22
"""Of what is told of a run, that may wait for a disk that does not take it: about ten thousand steps."""

Opens = Callable[[Any, TrackedRun], Tracker]
CLIENTS: dict[str, tuple[Opens, str]] = {
    "wandb": (Wandb, "wandb"),
    "mlflow": (Mlflow, "mlflow-skinny"),
    "trackio": (Trackio, "trackio"),
}
"""Of each tracker the adapter, and the package that has its client."""


def require_trackers(observe: ObserveConfig) -> None:
    """See that the clients are there that a run asks for.

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
    """A run of each tracker that is asked for, opened; that of the launch before, where the run goes on.

    Raises:
        ConfigError: a client refuses.
    """
    known = json.loads(folder.trackers.read_text(encoding="utf-8")) if folder.trackers.is_file() else {}
    settings = flat("", asdict(config))
    found: dict[str, Tracker] = {}
    for name in config.observe.trackers:
        asked = TrackedRun(
            project=config.observe.project,
            name=folder.root.name,
            run=known.get(name),
            settings=settings,
            folder=str(folder.root),
        )
        try:
            found[name] = CLIENTS[name][0](import_module(name), asked)
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise ConfigError(
                f"observe.trackers: {name} does not begin a run ({said}); mend its own settings, or leave it out."
            ) from error
    return found


def sinks(
    observe: ObserveConfig, folder: RunFolder, display: Sink, trackers: dict[str, Tracker], warn: Callable[[str], None]
) -> Sequence[Sink]:
    """The sinks of a run whose folder has been written. The last one makes the page of what the others have told.

    Args:
        observe: what the run asks for.
        folder: of the run.
        display: shows events to whoever started it.
        trackers: that are open.
        warn: is told in one line what could not be written.
    """
    found: list[Sink] = [JsonLines(folder.metrics, most_waiting_bytes=WAITING_BYTES, warn=warn), display]
    if observe.tensorboard:
        found.append(TensorBoard(folder.tensorboard, most_waiting_bytes=WAITING_BYTES))
    if trackers:
        write_whole(folder.trackers, json.dumps({name: tracker.run for name, tracker in trackers.items()}))
    found += [TrackerSink(name, tracker, warn) for name, tracker in trackers.items()]
    return [*found, ReportAtEnd(folder)]

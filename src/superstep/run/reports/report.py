"""The report of a run, report.html in its folder: written at the end of training, and by superstep view."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from superstep.errors import StateError, SuperstepError, UserError
from superstep.observe.doctor.failure_file import read_box
from superstep.observe.events import Event, RunFinished, RunStopped
from superstep.observe.jsonl import damage, read
from superstep.observe.page.report import ReportedRun, report_page
from superstep.observe.trace import load_trace
from superstep.plan.config_io import read_config
from superstep.program.text import read_program
from superstep.program.timeline import Timeline
from superstep.train.run_folder.run_paths import RunFolder, write_whole

PACKAGES = ("superstep", "torch", "numpy")
MOST_BYTES = 4_000_000
"""Largest trace that is drawn at the end of training: a larger one takes seconds, and superstep view draws it."""


class ReportAtEnd:
    """The sink that writes the page at the end of training; last among the sinks, so that all events are written."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def write(self, event: Event) -> None:
        """Write the page, at the end.

        Raises:
            Fault: the disk is full or broken.
        """
        if isinstance(event, RunFinished | RunStopped):
            _write_report(self._folder)

    def close(self) -> None: ...


def leave_report(folder: RunFolder) -> None:
    """Write the page of an ended run, if possible: errors of the run are reported elsewhere."""
    with suppress(SuperstepError, OSError):
        _write_report(folder)


def _write_report(folder: RunFolder) -> None:
    write_whole(folder.report, report_page([load_reported_run(folder, ran=read_recorded(folder))]))


def load_reported_run(folder: RunFolder, *, ran: Timeline | None = None) -> ReportedRun:
    """The content of a run's folder.

    Raises:
        StateError: it is no run, or has not begun to train, or its metrics are damaged.
    """
    if not folder.config.is_file():
        raise StateError(f"'{folder.root}' is not a run directory: it lacks run.toml. Name the folder of a run.")
    if not folder.metrics.is_file():
        raise StateError(f"'{folder.root}' has no metrics.jsonl yet: try again when the run has begun to train.")
    lines = list(read(folder.metrics))
    if not lines and b"\n" in folder.metrics.read_bytes():  # an incomplete first line is no damage
        raise StateError(f"{folder.metrics} has no readable line: it is damaged. Restore it from a copy.")
    return ReportedRun(
        name=str(folder.root),
        lines=lines,
        samples=list(read(folder.samples)) if folder.samples.is_file() else [],
        settings=folder.config.read_text(encoding="utf-8"),
        ran=ran,
        fault=_fault(folder),
        damage=damage(folder.metrics),
        facts=facts(),
    )


def _fault(folder: RunFolder) -> str:
    """Why a run failed; empty if it did not, has continued since, or the record cannot be read."""
    with suppress(OSError, StateError):
        if folder.fault.stat().st_mtime_ns >= folder.metrics.stat().st_mtime_ns:
            return read_box(folder.fault).fault
    return ""


def facts() -> dict[str, str]:
    """Facts of the machine that writes the page."""
    about = {"page written on": f"{platform.system()} {platform.release()}, {platform.machine()}"}
    about["cores"] = str(os.cpu_count())
    about["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            about[name] = version(name)
        except PackageNotFoundError:
            continue
    return about


def settings_of(folder: RunFolder) -> dict[str, object]:
    """Settings of a run by dotted names, without its place and what to do with an existing run."""
    settings = flat("", asdict(read_config(folder.config)))
    for name in ("state.dir", "state.existing"):
        settings.pop(name, None)
    return settings


def flat(prefix: str, value: dict[str, object]) -> dict[str, object]:
    """Settings by dotted names."""
    settings: dict[str, object] = {}
    for name, one in value.items():
        if isinstance(one, dict):
            settings |= flat(f"{prefix}{name}.", one)
        else:
            settings[f"{prefix}{name}"] = one
    return settings


def read_recorded(folder: RunFolder) -> Timeline | None:
    """The recorded step of a run, if any; the page does not need it."""
    try:
        if folder.trace.stat().st_size > MOST_BYTES:
            return None
        return load_trace(folder.trace, read_program(folder.program.read_text(encoding="utf-8"))).timeline
    except (OSError, ValueError, UserError):
        return None

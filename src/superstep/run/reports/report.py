"""The report of a run, report.html of its folder: written when training ends, however, and by superstep view."""

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
"""Of a trace whose step is drawn as training ends: a larger one takes seconds, and superstep view has them."""


class ReportAtEnd:
    """The sink that writes the page once training is over; last among the sinks, so that the others have told all."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def write(self, event: Event) -> None:
        """Write the page, at the end.

        Raises:
            Fault: the disk is full or broken.
        """
        if isinstance(event, RunFinished | RunStopped):
            _write_report(self._folder)

    def close(self) -> None:
        """Nothing is held."""


def leave_report(folder: RunFolder) -> None:
    """Write the page of a run whose ranks are gone, as far as they have told anything and there is room for it: what
    has become of the run is told elsewhere.
    """
    with suppress(SuperstepError, OSError):
        _write_report(folder)


def _write_report(folder: RunFolder) -> None:
    write_whole(folder.report, report_page([run_told(folder, ran=read_recorded(folder))]))


def run_told(folder: RunFolder, *, ran: Timeline | None = None) -> ReportedRun:
    """What a run's folder holds.

    Raises:
        StateError: it is no run, or has not begun to train, or what it told is damaged.
    """
    if not folder.config.is_file():
        raise StateError(f"'{folder.root}' is no run directory: it lacks run.toml. Name the folder that train wrote.")
    if not folder.metrics.is_file():
        raise StateError(f"'{folder.root}' has no metrics.jsonl yet: ask again when the run has begun to train.")
    lines = list(read(folder.metrics))
    if not lines and b"\n" in folder.metrics.read_bytes():  # a torn first line is no damage
        raise StateError(f"{folder.metrics} holds no line that can be read: it is damaged. Take it from a copy.")
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
    """Why a run broke off; empty where it did not, has gone on since, or what is left of it cannot be read."""
    with suppress(OSError, StateError):
        if folder.fault.stat().st_mtime_ns >= folder.metrics.stat().st_mtime_ns:
            return read_box(folder.fault).fault
    return ""


def facts() -> dict[str, str]:
    """Of the machine that writes the page."""
    found = {"page written on": f"{platform.system()} {platform.release()}, {platform.machine()}"}
    found["cores"] = str(os.cpu_count())
    found["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def settings_of(folder: RunFolder) -> dict[str, object]:
    """Every setting of a run by its dotted name, but for where the run lies and what was to become of one there."""
    found = flat("", asdict(read_config(folder.config)))
    for name in ("state.dir", "state.existing"):
        found.pop(name, None)
    return found


def flat(prefix: str, value: dict[str, object]) -> dict[str, object]:
    """Settings by their dotted names."""
    found: dict[str, object] = {}
    for name, one in value.items():
        if isinstance(one, dict):
            found |= flat(f"{prefix}{name}.", one)
        else:
            found[f"{prefix}{name}"] = one
    return found


def read_recorded(folder: RunFolder) -> Timeline | None:
    """The step that a run recorded, where it did; a page without it is a page all the same."""
    try:
        if folder.trace.stat().st_size > MOST_BYTES:
            return None
        return load_trace(folder.trace, read_program(folder.program.read_text(encoding="utf-8"))).timeline
    except (OSError, ValueError, UserError):
        return None

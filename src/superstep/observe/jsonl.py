"""metrics.jsonl: one JSON object a line for each event, its kind under the key ``event``.

    {"event": "step", "step": 12, "loss": 6.02, "lr": 0.0012, ...}
    {"event": "saved", "step": 12, "path": "runs/demo/checkpoints/12", ...}

A killed run leaves at most its last line torn. A resumed run first drops that line and the lines of the steps
that it will do again, so that the file reads as if the run had never stopped; so does one that goes back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from superstep.errors import disk_fault
from superstep.observe.append_file import AppendFile
from superstep.observe.events import Event, Resumed, RolledBack, RunStarted, Warned

_TAIL_BYTES = 2**20


class JsonLines:
    """The sink that keeps every event in one file."""

    def __init__(
        self, path: Path, *, most_waiting_bytes: int = 0, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """Goes on after what ``path`` holds.

        Args:
            path: the file.
            most_waiting_bytes: of lines that may wait in memory while the disk does not take them.
            warn: told in a line when lines begin to wait.

        Raises:
            Fault: the file cannot be opened.
        """
        self._path = path
        self._warn = warn
        self._most_bytes = most_waiting_bytes
        self._file = self._opened()
        if _is_torn(path):
            self._file.append(b"\n")

    def write(self, event: Event) -> None:
        """Append the event's line; ``Resumed`` and ``RolledBack`` first drop the lines of later steps.

        Raises:
            Fault: the disk is full or broken.
        """
        if isinstance(event, (Resumed, RolledBack)):
            self._file.close()
            drop_after(self._path, event.step)
            self._file = self._opened()
        step = -1 if isinstance(event, RunStarted) else event.step
        before = self._file.problem
        self._file.append(line(event), step=step)
        if self._file.problem and not before:
            text = f"{self._file.problem} Its lines wait in memory."
            self._file.append(line(Warned(step=max(0, step), text=text)), step=step)
            self._warn(text)

    def close(self) -> None:
        """Close the file.

        Raises:
            Fault: the disk does not take what has waited.
        """
        self._file.close()

    def _opened(self) -> AppendFile:
        return AppendFile(self._path, most_waiting_bytes=self._most_bytes)


def line(event: Event) -> bytes:
    """The event as one line of valid JSON. NaN and the infinities, which JSON lacks, become null."""
    fields = {key: _finite(value) for key, value in asdict(event).items()}
    return json.dumps({"event": event.name} | fields, allow_nan=False).encode() + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The file's objects, in order; torn lines are passed over."""
    with path.open("rb") as file:
        for text in file:
            if (found := parsed(text)) is not None:
                yield found


def last_line(path: Path) -> dict[str, Any]:
    """The last object of the file; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            texts = file.read().splitlines()
    except OSError:
        return {}
    return next((found for text in reversed(texts) if (found := parsed(text)) is not None), {})


def drop_after(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``, and torn lines; the others keep their bytes.

    The kept lines go to a file beside it, which takes its name once it is safe on disk: a crash leaves either
    the old file or the new one.

    Raises:
        Fault: the disk is full or broken; the old file is whole.
    """
    beside = path.with_name(path.name + ".new")
    try:
        with path.open("rb") as old, beside.open("wb") as new:
            for text in old:
                found = parsed(text)
                if found is not None and found.get("step", 0) <= step:
                    new.write(text if text.endswith(b"\n") else text + b"\n")
            new.flush()
            os.fsync(new.fileno())
        beside.replace(path)
    except OSError as error:
        raise disk_fault(error, path, step=step) from error


def parsed(text: bytes) -> dict[str, Any] | None:
    """The object of one line; None of a torn one."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_torn(path: Path) -> bool:
    """Whether the last line lacks its end."""
    with path.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        if length == 0:
            return False
        file.seek(length - 1)
        return file.read(1) != b"\n"

"""metrics.jsonl: one JSON object a line for each event, its kind under the key ``event``.

    {"event": "step", "step": 12, "loss": 6.02, "lr": 0.0012, ...}
    {"event": "saved", "step": 12, "path": "runs/demo/checkpoints/12", ...}

A killed run leaves at most its last line torn. A resumed run first drops that line and the lines of the steps that it
will repeat, so that the file reads as if the run had never stopped; so does a rollback. Any other unreadable line is
damaged: it stays, is skipped, and ``damage`` reports it.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from superstep.errors import disk_fault
from superstep.observe.append_file import AppendFile
from superstep.observe.events import Event, Resumed, RolledBack, RunStarted, Warned

_TAIL_BYTES = 2**20

MOST_NAMED = 10
"""The most unreadable lines that are named."""


class JsonLines:
    """The sink that writes every event into one file."""

    def __init__(
        self, path: Path, *, most_waiting_bytes: int = 0, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """Continue after the contents of ``path``.

        Args:
            most_waiting_bytes: the most lines in memory while the disk does not take them.
            warn: called with a line when lines begin to wait.

        Raises:
            Fault: the file cannot be opened.
        """
        self._path = path
        self._warn = warn
        self._most_bytes = most_waiting_bytes
        self._file = self._open()
        if _has_no_end(path):
            self._file.append(b"\n")

    def write(self, event: Event) -> None:
        """Append the event's line; ``Resumed`` and ``RolledBack`` first drop the lines of later steps. Raises Fault
        where the disk is full or broken.
        """
        if isinstance(event, (Resumed, RolledBack)):
            self._file.close()
            drop_after(self._path, event.step)
            self._file = self._open()
        step = -1 if isinstance(event, RunStarted) else event.step
        before = self._file.problem
        self._file.append(line(event), step=step)
        if self._file.problem and not before:
            text = f"{self._file.problem} Its lines wait in memory."
            self._file.append(line(Warned(step=max(0, step), text=text)), step=step)
            self._warn(text)

    def close(self) -> None:
        """Close the file; raises Fault where the disk does not take what has waited."""
        self._file.close()

    def _open(self) -> AppendFile:
        return AppendFile(self._path, most_waiting_bytes=self._most_bytes)


def line(event: Event) -> bytes:
    """The event as a line of valid JSON: NaN and the infinities become null."""
    fields = {key: _finite(value) for key, value in asdict(event).items()}
    return json.dumps({"event": event.name} | fields, allow_nan=False).encode() + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The file's objects, in order; unreadable lines are skipped, and ``damage`` reports them."""
    with path.open("rb") as file:
        for text in file:
            if (value := parse_line(text)) is not None:
                yield value


def damage(path: Path) -> str:
    """One line that names the file's unreadable lines; empty where all can be read. A last line without its end does
    not count: it may be in progress.
    """
    with path.open("rb") as file:
        numbers = [n for n, text in enumerate(file, start=1) if text.endswith(b"\n") and parse_line(text) is None]
    return damage_text(path, numbers)


def damage_text(path: Path, numbers: Sequence[int]) -> str:
    """A message about unreadable lines, by their numbers from 1."""
    if not numbers:
        return ""
    named = ", ".join(map(str, numbers[:MOST_NAMED])) + (", ..." if len(numbers) > MOST_NAMED else "")
    if len(numbers) == 1:
        return f"{path}: line {named} cannot be read, and what it told is left out; put it back from a copy."
    return (
        f"{path}: {len(numbers)} lines cannot be read ({named}), and what they told is left out; put them back from a "
        "copy."
    )


def last_line(path: Path) -> dict[str, Any]:
    """The last object of the file; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            texts = file.read().splitlines()
    except OSError:
        return {}
    return next((value for text in reversed(texts) if (value := parse_line(text)) is not None), {})


def drop_after(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``, and a torn last line; the others keep their bytes.

    The kept lines go to a file beside it, which replaces it once it is safe on disk: a crash leaves the old file or the
    new one. Raises Fault where the disk is full or broken; the old file is then complete.
    """
    beside = path.with_name(path.name + ".new")
    try:
        with path.open("rb") as old, beside.open("wb") as new:
            for text in old:
                value = parse_line(text)
                is_damaged = value is None and text.endswith(b"\n")
                if is_damaged or (value is not None and value.get("step", 0) <= step):
                    new.write(text if text.endswith(b"\n") else text + b"\n")
            new.flush()
            os.fsync(new.fileno())
        beside.replace(path)
    except OSError as error:
        raise disk_fault(error, path, step=step) from error


def parse_line(text: bytes) -> dict[str, Any] | None:
    """The object of a line; None for a torn one."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _has_no_end(path: Path) -> bool:
    """Whether only the last line's end is missing; a torn line is cut off. Raises Fault where that fails."""
    try:
        with path.open("rb+") as file:
            length = file.seek(0, os.SEEK_END)
            if length == 0:
                return False
            file.seek(length - 1)
            if file.read(1) == b"\n":
                return False
            file.seek(0)
            last = deque(file, maxlen=1).pop()
            if parse_line(last) is not None:
                return True
            file.truncate(length - len(last))
    except OSError as error:
        raise disk_fault(error, path) from error
    return False

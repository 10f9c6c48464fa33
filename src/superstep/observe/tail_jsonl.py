"""Follows a metrics.jsonl while it grows; reads each line once."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from superstep.observe.jsonl import damage_text, parse_line


class GrowingFile:
    """The objects of a growing file. A run that goes back replaces the file, which is then read again. Thread-safe.
    ``path``: of the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[dict[str, Any]] = []
        self._file: tuple[int, int] | None = None
        self._read_bytes = 0
        self._count = 0
        self._damaged: list[int] = []
        self._lock = threading.Lock()

    def read(self) -> list[dict[str, Any]]:
        """All objects so far, as a new list; an unfinished last line is left for the next call."""
        with self._lock:
            with suppress(OSError), self._path.open("rb") as file:  # it need not be there
                self._read(file.fileno())
            return list(self._lines)

    def damage(self) -> str:
        """Which of the lines so far are damaged; empty where none is."""
        with self._lock:
            return damage_text(self._path, self._damaged)

    def _read(self, handle: int) -> None:
        status = os.fstat(handle)
        if self._file != (status.st_dev, status.st_ino) or status.st_size < self._read_bytes:
            self._lines, self._read_bytes, self._file = [], 0, (status.st_dev, status.st_ino)
            self._count, self._damaged = 0, []
        piece = os.pread(handle, status.st_size - self._read_bytes, self._read_bytes)
        whole, end, _ = piece.rpartition(b"\n")
        self._read_bytes += len(whole) + len(end)
        for text in whole.split(b"\n") if end else ():
            self._count += 1
            if (value := parse_line(text)) is None:
                self._damaged.append(self._count)
            else:
                self._lines.append(value)

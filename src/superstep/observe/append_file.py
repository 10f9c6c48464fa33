"""AppendFile: a file that only grows. When a call returns, its data is with the operating system or known to wait."""

from __future__ import annotations

from pathlib import Path

from superstep.errors import disk_fault


class AppendFile:
    """Appends whole pieces to one file.

    Only data that the disk does not take is buffered: a killed process loses nothing that was appended before.
    """

    def __init__(self, path: Path, *, most_waiting_bytes: int = 0) -> None:
        """Open ``path`` at its end; create the file, but not its folder.

        Args:
            most_waiting_bytes: the most that may wait in memory while the disk does not take it; sent before the next
                piece.

        Raises:
            DiskFault: it cannot be opened.
        """
        self.path = path
        self.problem = ""
        """Why data waits; empty where none does."""
        self._waiting = bytearray()
        self._most_bytes = most_waiting_bytes
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise disk_fault(error, path) from error

    def append(self, piece: bytes, *, step: int = -1) -> None:
        """Append all of ``piece``.

        Raises:
            DiskFault: the disk is full or broken, and too much would wait; names the path, and ``step`` if it is known.
                The
            file may then end in a part of the piece.
        """
        self._waiting += piece
        self._write(step, self._most_bytes)

    def close(self) -> None:
        """Close the file; raises DiskFault where the disk does not take what has waited."""
        try:
            self._write(-1, 0)
        finally:
            self._file.close()

    def _write(self, step: int, most_bytes: int) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            fault = disk_fault(error, self.path, step=step)
            if len(self._waiting) > most_bytes:
                self._waiting.clear()  # it is lost, and that is told once
                raise fault from error
            self.problem = fault.message
        else:
            self.problem = ""

"""A file that only grows. What was appended is with the operating system when the call returns, or is told to wait."""

from __future__ import annotations

from pathlib import Path

from superstep.errors import disk_fault


class AppendFile:
    """Appends whole pieces to one file.

    There is no buffer of ours but for what the disk does not take: a killed process loses nothing that was appended
    before.
    """

    def __init__(self, path: Path, *, most_waiting_bytes: int = 0) -> None:
        """Opens ``path`` at its end and creates it where it is absent. Its folder is there.

        Args:
            path: the file.
            most_waiting_bytes: how much may wait in memory while the disk does not take it. It goes first with the
                next piece.

        Raises:
            DiskFault: it cannot be opened.
        """
        self.path = path
        self.problem = ""
        """Why something waits; empty where nothing does."""
        self._waiting = bytearray()
        self._most_bytes = most_waiting_bytes
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise disk_fault(error, path) from error

    def append(self, piece: bytes, *, step: int = -1) -> None:
        """Append all of ``piece``.

        Raises:
            DiskFault: the disk is full or broken, and more would wait than may; names the path, and ``step`` where it
                is known. The file then may end in a part of the piece.
        """
        self._waiting += piece
        self._write(step, self._most_bytes)

    def close(self) -> None:
        """Close the file.

        Raises:
            DiskFault: the disk does not take what has waited.
        """
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

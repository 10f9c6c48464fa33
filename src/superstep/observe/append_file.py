"""A file that only grows. What was appended is with the operating system when the call returns."""

from __future__ import annotations

from pathlib import Path

from superstep.errors import Fault


class AppendFile:
    """Appends whole pieces to one file.

    There is no buffer of ours: a killed process loses nothing that was appended, and the call that meets a
    full disk is the one that reports it.
    """

    def __init__(self, path: Path) -> None:
        """Opens ``path`` at its end and creates it, with its folder, where it is absent.

        Raises:
            Fault: it cannot be opened.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from error

    def append(self, piece: bytes, *, step: int = -1) -> None:
        """Append all of ``piece``.

        Raises:
            Fault: the disk is full or broken; names the path, and ``step`` where it is known. The file then
                may end in a part of the piece.
        """
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise unwritable(self.path, error, step=step) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def unwritable(path: Path, error: OSError, *, step: int = -1) -> Fault:
    """The fault that says which file could not be written, and what to do."""
    return Fault(
        f"{path} cannot be written: {error.strerror}; make room or mend the disk, then resume.",
        step=step,
    )

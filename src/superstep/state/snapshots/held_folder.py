"""An open folder: the same one under any name. Meanwhile its inode number is not reused."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from superstep.errors import Fault


class HeldFolder:
    """A descriptor of a folder.

    Args:
        path: an existing folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)

    def is_there(self) -> bool:
        """Whether it still has its name, possibly by a link."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._handle))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a failing disk is reported elsewhere
            return True

    def refuse_another(self) -> None:
        """Check that no other folder has taken its name.

        Raises:
            Fault: one has, and nothing may be written there.
        """
        if self.path.exists() and not self.is_there():
            raise Fault(f"'{self.path}' is another folder now, and nothing is written there.")

    def new_name(self) -> Path | None:
        """Its new path; None if it was removed, or the system does not tell."""
        with suppress(OSError):
            name = Path(os.readlink(f"/proc/self/fd/{self._handle}"))
            if os.path.samestat(name.stat(), os.fstat(self._handle)):
                return name
        return None

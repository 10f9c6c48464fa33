"""Detects whether the run directory was moved or removed during the run.

    same device and inode under the name     unchanged
    it has another name now                  the state is saved there, and the run ends
    it is gone                               the state is saved in NAME.rescued beside, and the run ends

In neither case a folder is made under the old name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from superstep.errors import Fault, disk_fault
from superstep.state.all_or_none import Peers, together
from superstep.state.snapshots.held_folder import HeldFolder
from superstep.train.run_folder.run_paths import RunFolder, write_whole


@dataclass(frozen=True, slots=True)
class RunFolderMoved:
    """A run directory that was moved or removed.

    Attributes:
        was: its old path.
        now: the path for the state: its new name, or a folder beside.
        is_removed: whether it is gone.
    """

    was: Path
    now: Path
    is_removed: bool

    def fault(self, step: int) -> Fault:
        """The fault that ends the run once the state after ``step`` is saved."""
        what = (
            f"was removed, with its metrics and older checkpoints; the state is saved in {self.now}"
            if self.is_removed
            else f"was moved to {self.now}; the state is saved there"
        )
        fault = Fault(f"state.dir = '{self.was}' {what}.", step=step)
        fault.saved_in = str(self.now)
        return fault


class FolderWatch:
    """Keeps the run directory open, under whatever name.

    Args:
        folder: an existing directory.
        texts: files that a folder needs to be resumed, by name.
    """

    def __init__(self, folder: RunFolder, texts: Mapping[str, str]) -> None:
        self._held = HeldFolder(folder.root)
        self._root = self._held.path
        self._texts = texts
        self._moved: RunFolderMoved | None = None

    def __enter__(self) -> FolderWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, trace)

    def look(self) -> RunFolderMoved | None:
        """The new path of the directory, if it changed. Read-only."""
        if self._moved is None and not self._held.is_there():
            moved = self._held.new_name()
            self._moved = RunFolderMoved(self._root, moved or self._beside(), moved is None)
        return self._moved

    def make(self, displaced: RunFolderMoved) -> None:
        """Make the folder that replaces a removed one."""
        if displaced.is_removed and not displaced.now.exists():
            displaced.now.mkdir(parents=True)
            for name, text in self._texts.items():
                write_whole(displaced.now / name, text)

    def _beside(self) -> Path:
        name, number = f"{self._root.name}.rescued", 1
        while (path := self._root.with_name(name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        return path


def follow(watch: FolderWatch | None, peers: Peers, folder: RunFolder) -> RunFolderMoved | None:
    """The new path of the run directory, if it changed; a removed one is replaced. Every rank calls this together.

    Args:
        watch: rank 0's.
        peers: the ranks.
        folder: its old path.

    Raises:
        Fault: the replacement cannot be made: on every rank the same.
    """

    def look() -> RunFolderMoved | None:
        change = None if watch is None else watch.look()
        if watch is not None and change is not None:
            watch.make(change)
        return change

    return together(peers, look, lambda error: disk_fault(error, folder.root), RunFolderMoved | None)[0]

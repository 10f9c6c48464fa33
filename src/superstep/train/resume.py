"""Going on from the newest checkpoint that is whole; those after it are told of and moved aside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from superstep.errors import DamagedCheckpoint, StateError
from superstep.state.all_or_none import together
from superstep.state.checkpoint_dirs import checkpoints, set_aside
from superstep.state.manifest import Position
from superstep.state.verify import nothing_whole
from superstep.train.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        path: the checkpoint.
        damaged: newer ones, and what is wrong with each.
    """

    position: Position
    path: Path
    damaged: dict[Path, str]

    def set_damaged_aside(self) -> tuple[str, ...]:
        """Give the damaged ones other names, as the run will come by their steps again; a line for each."""
        return tuple(_aside(folder, why) for folder, why in self.damaged.items())


def pass_over(checkpoint: Path, look: Callable[[Path], object]) -> tuple[str, ...]:
    """Move newer checkpoints than this one aside, which ``look`` has found damaged; a line for each."""
    found = checkpoints(checkpoint.parent)
    told = []
    for folder in found[found.index(checkpoint) + 1 :]:
        try:
            look(folder)
        except DamagedCheckpoint as error:
            told.append(_aside(folder, error.why))
    return tuple(told)


def _aside(folder: Path, why: str) -> str:
    return f"{why}; it is now {set_aside(folder).name}"


def resume(trainer: Trainer, root: Path) -> ResumePoint:
    """Load the newest checkpoint under a folder that is whole. Every rank calls this together.

    Raises:
        StateError: none is, or it is not of this run: on every rank the same.
    """

    def unreadable(error: Exception) -> StateError:
        return StateError(f"{root} cannot be read ({error}); mend that, then resume.")

    # One rank looks: what another sees of a network file system may be older.
    found = together(trainer.peers, lambda: [] if trainer.peers.rank else checkpoints(root), unreadable)[0]
    damaged: dict[Path, str] = {}
    for folder in reversed(found):
        try:
            position = trainer.load(folder)
        except DamagedCheckpoint as error:
            damaged[folder] = error.why
        else:
            return ResumePoint(position=position, path=folder, damaged=damaged)
    raise nothing_whole(next(iter(damaged.values()), f"{root} holds no checkpoint"))

"""Resume from the newest complete checkpoint; newer, damaged ones are reported and moved aside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from superstep.errors import DamagedCheckpoint, StateError
from superstep.state.checkpoint_dirs import checkpoints, set_aside
from superstep.state.manifest import Position
from superstep.state.verify import checkpoints_of, nothing_whole
from superstep.train.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run resumes.

    Attributes:
        path: the checkpoint.
        damaged: newer ones, with the damage of each.
    """

    position: Position
    path: Path
    damaged: dict[Path, str]

    def set_damaged_aside(self) -> tuple[str, ...]:
        """Rename the damaged checkpoints, as the run will reach their steps again; one line each."""
        return tuple(_aside(folder, why) for folder, why in self.damaged.items())


def pass_over(checkpoint: Path, look: Callable[[Path], object]) -> tuple[str, ...]:
    """Move newer checkpoints than this one aside, if ``look`` raises Damaged; one line each."""
    folders = checkpoints(checkpoint.parent)
    lines = []
    for folder in folders[folders.index(checkpoint) + 1 :]:
        try:
            look(folder)
        except DamagedCheckpoint as error:
            lines.append(_aside(folder, error.why))
    return tuple(lines)


def _aside(folder: Path, why: str) -> str:
    return f"{why}; it is now {set_aside(folder).name}"


def resume(trainer: Trainer, root: Path) -> ResumePoint:
    """Load the newest complete checkpoint of a folder. Every rank calls this together.

    Raises:
        StateError: there is none, or it belongs to another run: on every rank the same.
    """

    def unreadable(error: Exception) -> StateError:
        return StateError(f"{root} cannot be read ({error}); fix this, then resume.")

    folders = checkpoints_of(root, trainer.peers, unreadable)
    damaged: dict[Path, str] = {}
    for folder in reversed(folders):
        try:
            position = trainer.load(folder)
        except DamagedCheckpoint as error:
            damaged[folder] = error.why
        else:
            return ResumePoint(position=position, path=folder, damaged=damaged)
    raise nothing_whole(next(iter(damaged.values()), f"{root} holds no checkpoint"))

"""Resolve a path to weights: of a run, of a checkpoint, or of a Hugging Face folder. Without torch."""

from __future__ import annotations

from pathlib import Path

from superstep.errors import StateError
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.verify import glance
from superstep.train.run_folder.run_paths import RunFolder


def weights_of(path: Path) -> Path:
    """The folder of weights that a path names: the newest checkpoint of a run, else the folder itself.

    Raises:
        StateError: it does not exist, or is a run without a checkpoint.
    """
    if not path.exists():
        raise StateError(f"'{path}' is not there; name a run, a checkpoint or a Hugging Face folder.")
    return newest_checkpoint(path) if RunFolder(root=path).config.is_file() else path


def newest_checkpoint(run: Path) -> Path:
    """The last checkpoint of a run. Its tensors are not read: the reader verifies their hashes.

    Raises:
        StateError: there is none yet.
        Damaged: it is incomplete. An older one would not be the requested one.
    """
    folders = checkpoints(RunFolder(root=run).checkpoints)
    if not folders:
        raise StateError(f"'{run}' has no checkpoint yet; train it for at least state.save_every steps.")
    glance(folders[-1])
    return folders[-1]

"""The folder of a run's token files: where it lies, and that a run goes on with those that it was started with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from superstep.data.token_files import is_whole
from superstep.plan.resolution.resolve import Resolved
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.run_paths import RunFolder


def tokens_in(run: Resolved, folder: RunFolder, checkpoint: Path | None, make: Callable[[Path], object]) -> Path:
    """The folder of token files of a run.

    Args:
        run: that learns from them.
        folder: of the run.
        checkpoint: that it goes on from, if any.
        make: makes the files in a folder, where need be.
    """
    cache = run.config.data.cache
    kept = Path(cache) if cache else folder.root / "data"
    if checkpoint is None or not is_whole(kept):
        make(kept)
    if checkpoint is not None:
        run_directory.check_tokens(checkpoint, kept)
    return kept

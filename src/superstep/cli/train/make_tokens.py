"""The token files of a run, made with progress output where they are missing."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from superstep.cli.launcher import is_of_torchrun
from superstep.cli.prepare_progress import prepare_with_progress
from superstep.cli.train.terminal import Terminal
from superstep.data.preparation.prepare import is_prepared, prepare
from superstep.plan.resolution.resolve import Resolved
from superstep.run.exit_messages import end_by_signal
from superstep.run.tokens import tokens_in
from superstep.train.run_folder.run_lock import note_preparing
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import vocab_of


def tokens_of(run: Resolved, folder: RunFolder, checkpoint: Path | None) -> Path:
    """The folder of a run's token files; ``checkpoint`` as ``tokens_in``."""
    return tokens_in(run, folder, checkpoint, partial(_make, run, folder))


def _make(run: Resolved, folder: RunFolder, kept: Path) -> None:
    """Make the token files of a run, with progress output."""
    data = run.config.data
    if is_prepared(data, vocab_of(run), kept):
        prepare(data, vocab_of(run), kept)
        return
    try:
        prepare_with_progress(
            data,
            vocab_of(run),
            kept,
            sys.stdout,
            is_shared=bool(data.cache),
            note=partial(note_preparing, folder),
        )
    except (KeyboardInterrupt, SystemExit) as error:
        if (status := end_by_signal(error, folder, Terminal(), is_of_torchrun=is_of_torchrun())) is not None:
            raise SystemExit(status) from None
        raise

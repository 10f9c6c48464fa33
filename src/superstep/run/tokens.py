"""The data of a run: its folder of token files and the check that a resumed run uses the same ones; or its samples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from superstep.data.preparation.prepare import is_prepared, prepare
from superstep.data.samples.sample_file import check_pure
from superstep.data.sources.source import open_any_samples
from superstep.data.token_files import is_whole
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.sample_fields import is_prepared_folder
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.run_paths import RunFolder, tokens_folder
from superstep.train.weights.model import vocab_of


def tokens_in(run: Resolved, folder: RunFolder, checkpoint: Path | None, make: Callable[[Path], object]) -> Path:
    """The folder of token files of a run, or its file of samples.

    Args:
        run: the resolved run.
        folder: of the run.
        checkpoint: to resume from, if any.
        make: makes the files in a folder, if needed.
    """
    if run.config.data.source is not None:
        return prepare_samples(run.config.data.source, run.config.train.seed)
    return fill_folder(tokens_folder(run.config, folder.root), checkpoint, make)


def fill_folder(kept: Path, checkpoint: Path | None, make: Callable[[Path], object]) -> Path:
    """The folder of token files, made or opened; the other arguments are those of ``tokens_in``."""
    if checkpoint is None or not is_whole(kept):
        make(kept)
    if checkpoint is not None:
        run_directory.check_tokens(checkpoint, kept)
    return kept


def prepare_samples(source: str, seed: int) -> Path:
    """The file of samples, some of which are read twice; or the folder of conversations. Raises as ``check_pure``."""
    samples = open_any_samples(source)
    if not is_prepared_folder(source):
        check_pure(samples, seed)
    return Path(source)


@contextmanager
def proof_tokens(run: Resolved, make: Callable[[Path], object]) -> Iterator[Path]:
    """A run's own token files, unchanged, or a temporary folder that ``make`` fills for the block; or its samples."""
    if run.config.data.source is not None:
        yield prepare_samples(run.config.data.source, run.config.train.seed)
        return
    data, vocab = run.config.data, vocab_of(run)
    kept = tokens_folder(run.config, Path(run.config.state.dir))
    if is_prepared(data, vocab, kept):
        prepare(data, vocab, kept)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="superstep-prove-") as folder:
        make(Path(folder))
        yield Path(folder)

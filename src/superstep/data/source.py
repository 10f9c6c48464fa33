"""The source of a run's data: opened, and read as a stream of batches."""

from __future__ import annotations

from pathlib import Path

from superstep.data.batch import SplitName
from superstep.data.token_files import Corpus, open_corpus
from superstep.data.token_stream import TokenStream
from superstep.data.token_stream import stream_of as token_stream_of
from superstep.plan.config import RunConfig


def open_source(place: Path) -> Corpus:
    """Open a run's data.

    Args:
        place: the folder of token files.

    Raises:
        DataError: it cannot be read.
    """
    return open_corpus(place)


def stream_of(config: RunConfig, source: Corpus, split: SplitName) -> TokenStream:
    """A split of the data with the run's settings."""
    return token_stream_of(config, source, split)

"""The source of a run's data: token files, a user's file of samples, or conversations with pictures or sounds; all are
read as streams of batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from superstep.data.batch import BatchSource, SplitName
from superstep.data.samples.ragged_rows import write_filled
from superstep.data.samples.sample_file import SampleFile, open_samples
from superstep.data.samples.sample_stream import SampleStream
from superstep.data.sources.conversations import open_conversations
from superstep.data.token_files import MEDIA_SETTINGS, Corpus, open_corpus
from superstep.data.token_stream import stream_of as token_stream_of
from superstep.errors import StateError
from superstep.plan.config import RunConfig

Source = Corpus | SampleFile


class DataStream(BatchSource, Protocol):
    """One split of the data as global batches."""

    @property
    def sequences(self) -> int:
        """Rows of an epoch."""
        ...


def open_source(place: Path) -> Source:
    """Open a run's data.

    Args:
        place: the folder of token files or of conversations, or the file of samples.

    Raises:
        ConfigError, DataError: it cannot be read.
    """
    return open_any_samples(place) if place.is_file() or (place / MEDIA_SETTINGS).is_file() else open_corpus(place)


def open_any_samples(source: str | Path) -> SampleFile:
    """Open what ``data.source`` names: a Python file, or a prepared folder of conversations; raises as ``open_source``
    does.
    """
    path = Path(source)
    return open_conversations(path) if path.is_dir() else open_samples(path)


def bytes_per_token(source: Source) -> float | None:
    """Bytes of text for each token; None for samples."""
    return source.manifest.bytes_per_token if isinstance(source, Corpus) else None


def unigram_nats(source: Source) -> float | None:
    """The loss of a model that knows only how frequent each token is, in nats; None for samples."""
    return source.manifest.unigram_nats if isinstance(source, Corpus) else None


def describe_rows(source: Source) -> str | None:
    """How full the rows of training are, in one line; None where a row is no pack of ragged samples."""
    if isinstance(source, Corpus) or source.size is None:
        return None
    return write_filled(source.sizes("train"), source.fields.capacities)


def check_kind(source: Source, place: Path, *, is_pairs: bool) -> None:
    """Check that the data is of the kind that the running command reads: pairs of answers, or anything else.

    Raises:
        StateError: names the command that prepared these token files.
    """
    kind = source.manifest.kind if isinstance(source, Corpus) else "text"
    if (kind == "pairs") != is_pairs:
        verb = {"text": "train", "answers": "tune sft", "pairs": "tune dpo"}[kind]
        raise StateError(f"the tokens in {place} are those of superstep {verb}; resume the run with that command.")


def stream_of(config: RunConfig, source: Source, split: SplitName) -> DataStream:
    """A split of the data with the run's settings."""
    if isinstance(source, Corpus):
        return token_stream_of(config, source, split)
    train = config.train
    return SampleStream(source, split, batch_sequences=train.batch_sequences, seed=train.seed)

"""Preparation of a corpus: read the text, train a tokenizer unless one is named, encode every document to files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from superstep.data.preparation.corpus import CorpusReader, source_files
from superstep.data.preparation.corpus_checks import refuse_one_document, refuse_settings, refuse_short
from superstep.data.preparation.prepare_lock import ignore_line, take_turn
from superstep.data.split_documents import PASSAGE_CHARS, DocumentPart, passages
from superstep.data.token_files import FORMAT, Corpus, is_whole, open_corpus
from superstep.data.token_writer import PartialFiles, Passage
from superstep.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from superstep.errors import DataError, disk_fault, is_full
from superstep.plan.config import DataConfig
from superstep.state.fsync import free_bytes

BLOCK_CHARS = 1 << 20
"""Characters that one call encodes and writes: it cannot be interrupted, and takes less than a second."""


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """Progress of a preparation.

    Attributes:
        stage: reading to train a tokenizer, training it, or encoding.
        done_bytes: bytes of the corpus that this stage has processed.
        total_bytes: bytes of the corpus.
    """

    stage: Literal["reading", "training a tokenizer", "encoding"]
    done_bytes: int
    total_bytes: int


Report = Callable[[PrepareProgress], None]


def _ignore_progress(progress: PrepareProgress) -> None:
    pass


def prepare(
    config: DataConfig,
    vocab: int,
    folder: Path,
    report: Report = _ignore_progress,
    *,
    tell: Callable[[str], None] = ignore_line,
    is_shared: bool = False,
) -> Corpus:
    """Make the token files of ``config`` in ``folder``, or open those of an earlier equal call.

    One process at a time prepares a folder; another one waits and opens the result. An existing corpus stays complete
    until the new one is; partial files of a killed call are replaced.

    Args:
        vocab: the model's vocabulary; a tokenizer is trained up to it, a loaded one must fit in it.
        report: receives the progress, about once for each megabyte.
        tell: receives a line for the user if this process waits for another one.
        is_shared: whether other runs may use the folder's tokens; then tokens of other settings are not replaced.

    Raises:
        ConfigError, DataError: the settings, the text or the tokenizer cannot be used, or a shared folder holds other
            tokens.
        Fault: the folder cannot be written, or the disk is full.
    """
    refuse_settings(config)
    tokenizer = None if config.tokenizer is None else load_tokenizer(Path(config.tokenizer))
    if tokenizer is not None and tokenizer.vocab > vocab:
        raise DataError(
            f"data.tokenizer = '{config.tokenizer}' has {tokenizer.vocab} ids, more than model.vocab = "
            f"{vocab}; set model.vocab to {tokenizer.vocab} or more."
        )
    if not is_prepared(config, vocab, folder):
        with take_turn(folder, tell):
            if not is_prepared(config, vocab, folder):  # another process may have prepared it in the meantime
                if is_shared:
                    refuse_others(config, vocab, folder)
                _Preparation(config, report).build(tokenizer, vocab, folder)
    corpus = open_corpus(folder)
    refuse_short(config, corpus.manifest.train_tokens, corpus.manifest.validation_tokens)
    refuse_one_document(config, corpus.manifest.train_documents)
    return corpus


def is_prepared(config: DataConfig, vocab: int, folder: Path) -> bool:
    """Whether the folder holds the tokens that ``prepare`` would make of the same text; raises as it does."""
    return is_whole(folder) and open_corpus(folder).manifest.fingerprint == _fingerprint(config, vocab)


def refuse_others(config: DataConfig, vocab: int, folder: Path) -> None:
    """Check that a folder holds no tokens of other settings, which another run may need.

    Raises:
        DataError: it does.
    """
    if not is_whole(folder) or is_prepared(config, vocab, folder):
        return
    theirs = open_corpus(folder).manifest
    differs = "the files, the tokenizer or a setting such as data.validation_fraction differs"
    if config.tokenizer is None and _fingerprint(config, theirs.vocab) == theirs.fingerprint:
        differs = f"model.vocab = {theirs.vocab} there, {vocab} here"
    raise DataError(
        f"data.cache = '{folder}' holds the tokens of other settings ({differs}); name another folder, or delete that "
        "one if no run needs it."
    )


def _fingerprint(config: DataConfig, vocab: int) -> str:
    tokenizer = vocab if config.tokenizer is None else stamp(Path(config.tokenizer))
    inputs = [stamp(file.path) for file in source_files(config.corpus)]
    shaped_by = [FORMAT, config.text_field, config.nulls, config.validation_fraction, tokenizer, inputs]
    return hashlib.sha256(json.dumps(shaped_by).encode()).hexdigest()


def stamp(path: Path) -> tuple[str, int, int]:
    """Path, size and modification time in nanoseconds, to detect changes; both are -1 for a broken link."""
    try:
        status = path.stat()
    except OSError:
        return str(path.absolute()), -1, -1
    return str(path.absolute()), status.st_size, status.st_mtime_ns


def source_bytes(config: DataConfig) -> int:
    """Bytes of all files of a corpus."""
    return sum(max(stamp(file.path)[1], 0) for file in source_files(config.corpus))


class PreparedFiles(Protocol):
    """Files that are being written."""

    @property
    def folder(self) -> Path: ...

    def discard(self) -> None:
        """Delete the partial files."""
        ...

    def estimate_bytes(self, source_bytes: int) -> int:
        """Approximate final size."""
        ...


class _Preparation:
    """One pass over the text of a corpus; two if a tokenizer is trained."""

    def __init__(self, config: DataConfig, report: Report) -> None:
        self._config = config
        self._report = report
        self._total_bytes = source_bytes(config)

    def build(self, tokenizer: Tokenizer | None, vocab: int, folder: Path) -> None:
        """Write every file under a temporary name, then rename all of them."""
        config = self._config
        fingerprint = _fingerprint(config, vocab)  # first: if a file changes while it is read, the next run notices
        files = PartialFiles(folder, tokenizer or self._train_tokenizer(vocab))
        reader = CorpusReader(config)
        with writing(files, config):
            with ExitStack() as stack:
                files.open(stack)
                for block in _blocks(passages(reader.parts(), PASSAGE_CHARS)):
                    files.append(block, config.validation_fraction)
                    self._report(PrepareProgress("encoding", reader.read_bytes, self._total_bytes))
            files.hold_out_tail(config.validation_fraction)
            refuse_short(config, files.tokens("train"), files.tokens("validation"))
            refuse_one_document(config, files.documents("train"))
            files.finish(fingerprint, reader.nulls)
            files.publish()

    def _train_tokenizer(self, vocab: int) -> Tokenizer:
        def texts() -> Iterator[str]:
            reader = CorpusReader(self._config)
            for part in passages(reader.parts(), PASSAGE_CHARS):
                self._report(PrepareProgress("reading", reader.read_bytes, self._total_bytes))
                yield part.text
            self._report(PrepareProgress("training a tokenizer", 0, self._total_bytes))

        return train_tokenizer(texts(), vocab)


def _blocks(parts: Iterator[DocumentPart]) -> Iterator[list[Passage]]:
    """The documents as passages, in lists of about ``BLOCK_CHARS`` characters."""
    block: list[Passage] = []
    chars = document = 0
    for part in parts:
        block.append(Passage(part.text, document, part.is_last))
        document += part.is_last
        chars += len(part.text)
        if chars >= BLOCK_CHARS:
            yield block
            block, chars = [], 0
    if block:
        yield block


@contextmanager
def writing(files: PreparedFiles, config: DataConfig) -> Iterator[None]:
    """Discard the partial files after a failure, and convert the system's errors into Faults."""
    try:
        yield
    except OSError as error:
        files.discard()
        fault = disk_fault(error, files.folder)
        if not is_full(error):
            raise fault.adding("Or set data.cache to another folder.") from None
        raise fault.adding(
            f"Or set data.cache to a folder on a larger disk: the tokens take about "
            f"{files.estimate_bytes(source_bytes(config))} bytes, and {free_bytes(files.folder)} are free here."
        ) from None
    except BaseException:
        files.discard()
        raise

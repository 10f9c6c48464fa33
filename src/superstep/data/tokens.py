"""Token files: a corpus as numbers on disk, mapped into memory.

A prepared folder holds::

    train.tokens  validation.tokens   every document's ids, each followed by the end of text; uint16 or uint32
    train.index   validation.index    int64 .npy: where each document starts, and last where the stream ends
    tokenizer.json                    what made the ids
    corpus.json                       the manifest, written last: a folder without one is not prepared

Whole documents are held out for validation, chosen by a hash of their number: spread over the corpus, the
same for every seed, and unmoved by documents that are added at the end. A corpus of a few long documents
cannot be split so; there the tail of the stream is held out too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from superstep.data.corpus import documents, source_files
from superstep.data.order import mix64
from superstep.data.refuse import refuse_one_document, refuse_settings, refuse_short
from superstep.data.tokenizer import PASSAGE_CHARS, Tokenizer, load_tokenizer, passages, train_tokenizer
from superstep.data.turn import turn, unheard
from superstep.errors import DataError, Fault
from superstep.plan.config import DataConfig

SplitName = Literal["train", "validation"]
TokenArray = NDArray[np.uint16 | np.uint32]

SPLITS: tuple[SplitName, ...] = ("train", "validation")
FILES = (
    "train.tokens",
    "train.index",
    "validation.tokens",
    "validation.index",
    "tokenizer.json",
    "corpus.json",
)
"""The files of a prepared folder, in the order they are named: the manifest last."""

FORMAT = 1
"""Changes when the files do, so that files of an older format are made again."""

BLOCK_CHARS = 4_000_000
"""Text that is encoded and written at once."""

BLOCK_TOKENS = 1 << 22
"""Tokens that are counted at once."""

_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What ``corpus.json`` says about the files beside it.

    Attributes:
        fingerprint: a hash of the inputs (paths, sizes, times of change) and the settings that shape them.
        vocab: one more than the tokenizer's largest id; the model's vocabulary is this or larger.
        text_bytes: the UTF-8 bytes of all documents of both splits.
        bytes_per_token: text_bytes over the tokens of both splits, ends of text included.
        unigram_nats: the cross-entropy, in nats per token, of the validation split under the token counts of
            the train split, one added to each. A model that does no better knows nothing of order.
    """

    format: int
    fingerprint: str
    dtype: Literal["uint16", "uint32"]
    vocab: int
    end_of_text: int
    train_tokens: int
    train_documents: int
    validation_tokens: int
    validation_documents: int
    text_bytes: int
    bytes_per_token: float
    unigram_nats: float


@dataclass(frozen=True, slots=True)
class Split:
    """One split as arrays mapped from disk.

    Attributes:
        tokens: every document, each followed by the end of text.
        bounds: document i is ``tokens[bounds[i] : bounds[i + 1]]``.
    """

    tokens: TokenArray
    bounds: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """A prepared folder, open for reading."""

    folder: Path
    manifest: Manifest
    train: Split
    validation: Split

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, loaded from the folder."""
        return load_tokenizer(self.folder / "tokenizer.json")


def prepare(config: DataConfig, vocab: int, folder: Path, *, tell: Callable[[str], None] = unheard) -> Corpus:
    """Makes the token files of ``config`` in ``folder``, or opens those that an equal call has made.

    One process at a time prepares a folder; another waits for it and opens what it made. A corpus that the
    folder holds already stays whole until the new one is; what a killed call left is made again.

    Args:
        vocab: the model's vocabulary; a tokenizer is trained up to it, a loaded one must fit in it.
        tell: given a line for the user where another process is waited for.

    Raises:
        ConfigError, DataError: where the settings, the text or the tokenizer cannot be used.
        Fault: where the folder cannot be written, or the disk is full.
    """
    refuse_settings(config)
    tokenizer = None if config.tokenizer is None else load_tokenizer(Path(config.tokenizer))
    if tokenizer is not None and tokenizer.vocab > vocab:
        raise DataError(
            f"data.tokenizer = '{config.tokenizer}' has {tokenizer.vocab} ids, more than model.vocab = "
            f"{vocab}; set model.vocab to {tokenizer.vocab} or more."
        )
    if not is_prepared(config, vocab, folder):
        with turn(folder, tell):
            if not is_prepared(config, vocab, folder):  # nobody has made it meanwhile
                _build(config, tokenizer, vocab, folder, _fingerprint(config, vocab))
    corpus = open_corpus(folder)
    refuse_short(config, corpus.manifest.train_tokens, corpus.manifest.validation_tokens)
    refuse_one_document(config, corpus.manifest.train_documents)
    return corpus


def open_corpus(folder: Path) -> Corpus:
    """A prepared folder, open for reading. Any number of processes may have it open.

    Raises:
        DataError: where the folder was not prepared, or its files are not what the manifest says.
    """
    try:
        manifest = Manifest(**json.loads((folder / "corpus.json").read_text(encoding="utf-8")))
        if manifest.format != FORMAT:
            raise ValueError(f"format {manifest.format}, not {FORMAT}")
        train, validation = (_open_split(folder, split, manifest) for split in SPLITS)
        (folder / "tokenizer.json").stat()
    except (OSError, EOFError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"data.cache: '{folder}' holds no whole corpus ({error}); prepare it again.") from None
    return Corpus(folder, manifest, train, validation)


def _open_split(folder: Path, split: SplitName, manifest: Manifest) -> Split:
    # Maps read nothing yet: the lengths are checked here, the pages come when they are used.
    tokens: TokenArray = np.memmap(folder / f"{split}.tokens", manifest.dtype, "r")
    bounds: NDArray[np.int64] = np.load(folder / f"{split}.index", mmap_mode="r")
    stated = manifest.train_tokens if split == "train" else manifest.validation_tokens
    if not len(tokens) == bounds[-1] == stated:
        raise ValueError(f"{split} has {len(tokens)} tokens, its index ends at {bounds[-1]}, not at {stated}")
    return Split(tokens, bounds)


def is_whole(folder: Path) -> bool:
    """Whether the folder holds a corpus, of whatever text."""
    try:
        open_corpus(folder)
    except DataError:
        return False
    return True


def is_prepared(config: DataConfig, vocab: int, folder: Path) -> bool:
    """Whether the folder holds the tokens that ``prepare`` would make of the same text; raises as it does."""
    return is_whole(folder) and open_corpus(folder).manifest.fingerprint == _fingerprint(config, vocab)


def _fingerprint(config: DataConfig, vocab: int) -> str:
    tokenizer = vocab if config.tokenizer is None else _stamp(Path(config.tokenizer))
    inputs = [_stamp(file.path) for file in source_files(config.corpus)]
    shaped_by = [FORMAT, config.text_field, config.validation_fraction, tokenizer, inputs]
    return hashlib.sha256(json.dumps(shaped_by).encode()).hexdigest()


def _stamp(path: Path) -> tuple[str, int, int]:
    """Differs when a file does: its path, bytes and time of change in nanoseconds; a broken link has none."""
    try:
        found = path.stat()
    except OSError:
        return str(path.absolute()), -1, -1
    return str(path.absolute()), found.st_size, found.st_mtime_ns


def _build(config: DataConfig, tokenizer: Tokenizer | None, vocab: int, folder: Path, fingerprint: str) -> None:
    """Writes every file under a partial name, then gives all of them their names."""
    tokenizer = tokenizer or train_tokenizer(documents(config.corpus, config.text_field), vocab)
    files = _PartialFiles(folder, tokenizer)
    with _writing(files, config):
        with ExitStack() as stack:
            files.open(stack)
            for block in _blocks(documents(config.corpus, config.text_field)):
                files.append(block, config.validation_fraction)
        files.hold_out_tail(config.validation_fraction)
        refuse_short(config, files.tokens("train"), files.tokens("validation"))
        refuse_one_document(config, files.documents("train"))
        files.finish(fingerprint)
        files.publish()


@dataclass(frozen=True, slots=True)
class _Passage:
    """A part of a document: what is encoded at once."""

    text: str
    document: int
    is_last: bool


def _blocks(texts: Iterable[str]) -> Iterator[list[_Passage]]:
    """The documents as passages, in lists of about ``BLOCK_CHARS`` characters."""
    block: list[_Passage] = []
    chars = 0
    for document, text in enumerate(texts):
        unread = len(text)
        for part in passages(text, PASSAGE_CHARS):
            unread -= len(part)
            block.append(_Passage(part, document, is_last=unread == 0))
            chars += len(part)
            if chars >= BLOCK_CHARS:
                yield block
                block, chars = [], 0
    if block:
        yield block


def _held_out(document_numbers: list[int], fraction: float) -> list[bool]:
    """Whether each document is held out: whether the hash of its number is below the fraction."""
    hashes = mix64(np.array(document_numbers, np.uint64))
    return [bool(is_below) for is_below in hashes < np.uint64(int(fraction * 2.0**64))]


class _PartialFiles:
    """The files of a corpus under their partial names, until ``publish`` renames them."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
        self.text_bytes = 0
        self._tokens: dict[SplitName, int] = dict.fromkeys(SPLITS, 0)
        self._bounds: dict[SplitName, array[int]] = {split: array("q", [0]) for split in SPLITS}
        self._streams: dict[SplitName, IO[bytes]] = {}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{_PARTIAL}"

    def tokens(self, split: SplitName) -> int:
        """Tokens of the split so far."""
        return self._tokens[split]

    def documents(self, split: SplitName) -> int:
        """Documents of the split so far."""
        return len(self._bounds[split]) - 1

    def expected_bytes(self, source_bytes: int) -> int:
        """About how large the token files will be; before any text is encoded, two bytes of text a token."""
        tokens = self.tokens("train") + self.tokens("validation")
        tokens_per_byte = tokens / self.text_bytes if self.text_bytes else 0.5
        return round(source_bytes * tokens_per_byte) * np.dtype(self.dtype).itemsize

    def open(self, stack: ExitStack) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            self._streams[split] = stack.enter_context(self.path(f"{split}.tokens").open("wb"))

    def append(self, block: list[_Passage], validation_fraction: float) -> None:
        """Encodes and writes the next passages, each to the split of its document."""
        encoded = self.tokenizer.encode_batch([passage.text for passage in block])
        held_out = _held_out([passage.document for passage in block], validation_fraction)
        for passage, ids, is_held_out in zip(block, encoded, held_out, strict=True):
            split: SplitName = "validation" if is_held_out else "train"
            written = [*ids, self.tokenizer.end_of_text] if passage.is_last else ids
            self._streams[split].write(np.array(written, self.dtype).tobytes())
            self._tokens[split] += len(written)
            self.text_bytes += len(passage.text.encode())
            if passage.is_last:
                self._bounds[split].append(self._tokens[split])

    def hold_out_tail(self, validation_fraction: float) -> None:
        """Moves the end of train to validation where documents are less than half of the share wanted."""
        wanted = round(validation_fraction * (self.tokens("train") + self.tokens("validation")))
        missing = wanted - self.tokens("validation")
        if 2 * missing <= wanted:
            return
        cut = self.tokens("train") - missing
        cut_bytes = cut * np.dtype(self.dtype).itemsize
        with (
            self.path("train.tokens").open("rb+") as train,
            self.path("validation.tokens").open("ab") as validation,
        ):
            train.seek(cut_bytes)
            shutil.copyfileobj(train, validation)
            train.truncate(cut_bytes)
        bounds, shift = self._bounds["train"], self.tokens("validation") - cut
        self._bounds["validation"].extend(bound + shift for bound in bounds if bound > cut)
        self._bounds["train"] = array("q", [*(bound for bound in bounds if bound < cut), cut])
        self._tokens["train"] -= missing
        self._tokens["validation"] += missing

    def finish(self, fingerprint: str) -> None:
        """Writes what stands beside the tokens: indexes, tokenizer, manifest."""
        for split in SPLITS:
            with self.path(f"{split}.index").open("wb") as file:
                np.save(file, np.array(self._bounds[split], np.int64))
        self.tokenizer.save(self.path("tokenizer.json"))
        manifest = json.dumps(asdict(self._manifest(fingerprint)), indent=2)
        self.path("corpus.json").write_text(manifest + "\n", encoding="utf-8")

    def publish(self) -> None:
        """Gives all files their names. A manifest never stands over files that it does not describe."""
        for name in FILES:
            with self.path(name).open("rb+") as file:
                os.fsync(file.fileno())
        (self.folder / "corpus.json").unlink(missing_ok=True)
        for name in FILES:
            self.path(name).replace(self.folder / name)

    def discard(self) -> None:
        for name in FILES:
            with suppress(OSError):  # called while something else has failed already
                self.path(name).unlink()

    def _manifest(self, fingerprint: str) -> Manifest:
        train, validation = self._counts("train"), self._counts("validation")
        nats_of_id = np.log(train.sum() + len(train)) - np.log(train + 1)
        return Manifest(
            format=FORMAT,
            fingerprint=fingerprint,
            dtype=self.dtype,
            vocab=self.tokenizer.vocab,
            end_of_text=self.tokenizer.end_of_text,
            train_tokens=self.tokens("train"),
            train_documents=self.documents("train"),
            validation_tokens=self.tokens("validation"),
            validation_documents=self.documents("validation"),
            text_bytes=self.text_bytes,
            bytes_per_token=self.text_bytes / (self.tokens("train") + self.tokens("validation")),
            unigram_nats=float(nats_of_id @ validation / validation.sum()),
        )

    def _counts(self, split: SplitName) -> NDArray[np.int64]:
        """How often each id occurs in the split."""
        tokens: TokenArray = np.memmap(self.path(f"{split}.tokens"), self.dtype, "r")
        counts = np.zeros(self.tokenizer.vocab, np.int64)
        for start in range(0, len(tokens), BLOCK_TOKENS):
            counts += np.bincount(tokens[start : start + BLOCK_TOKENS], minlength=len(counts))
        return counts


@contextmanager
def _writing(files: _PartialFiles, config: DataConfig) -> Iterator[None]:
    """Discards the partial files after a failure, and turns the system's errors into Faults."""
    try:
        yield
    except OSError as error:
        files.discard()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise Fault(f"cannot write '{files.folder}' ({error}); set data.cache to a folder that can be.") from None
        existing = next(path for path in (files.folder, *files.folder.absolute().parents) if path.exists())
        free_bytes = shutil.disk_usage(existing).free
        source_bytes = sum(_stamp(file.path)[1] for file in source_files(config.corpus))
        raise Fault(
            f"no space left in '{files.folder}': tokens take about {files.expected_bytes(source_bytes)} "
            f"bytes, {free_bytes} are free; set data.cache to a folder on a larger disk."
        ) from None
    except BaseException:
        files.discard()
        raise

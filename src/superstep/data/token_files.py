"""Token files: a corpus as numbers on disk, mapped into memory.

A prepared folder holds::

    train.tokens  validation.tokens   every document's ids, each followed by the end of text; uint16 or uint32
    train.index   validation.index    int64 .npy: the start of each document, and last the end of the stream
    tokenizer.json                    the tokenizer of the ids
    corpus.json                       the manifest, written last: a folder without one is not prepared

Whole documents are held out for validation, chosen by a hash of their number: spread over the corpus, the same for
every seed, and unaffected by documents that are added at the end. A corpus of a few long documents cannot be split so;
there the tail of the stream is held out too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from superstep.data.batch import SPLITS, SplitName
from superstep.data.tokenizer import Tokenizer, load_tokenizer
from superstep.errors import DataError

TokenKind = Literal["text", "answers", "pairs"]
TokenArray = NDArray[np.uint16 | np.uint32]

FILES = (
    "train.tokens",
    "train.index",
    "validation.tokens",
    "validation.index",
    "tokenizer.json",
    "corpus.json",
)
"""The files of a prepared folder, in the order of renaming: the manifest last."""

ANSWER_FILES = (
    "train.answers",
    "train.packs",
    "validation.answers",
    "validation.packs",
    "chat.json",
)
"""Additional files of prepared conversations; ``chat.json`` describes their rendering."""

MEDIA_SETTINGS = "media.json"
MEDIA_FILES = ("train.media", "validation.media", MEDIA_SETTINGS)
"""Additional files of prepared conversations with pictures or sounds."""

FORMAT = 1
"""Changes with the format, so that files of an older format are made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusManifest:
    """The content of ``corpus.json``.

    Attributes:
        fingerprint: a hash of the inputs (paths, sizes, times of change) and the settings that shape them.
        vocab: one more than the tokenizer's largest id; the model's vocabulary is this or larger.
        text_bytes: the UTF-8 bytes of all documents of both splits.
        bytes_per_token: text_bytes over the tokens of both splits, ends of text included.
        unigram_nats: the cross-entropy, in nats per token, of the validation split under the token counts of the train
            split, one added to each. A model that does no better knows nothing of order.
        null_records: number of skipped records with a null text.
        kind: whether every token is learnt, or answers alone (``answers.py``), or pairs of answers, the better one
            first; then the figures above cover answers only.
        sequence_tokens: of the packed sequences of conversations.
        dropped: number of conversations that were too long and are left out.
        truncated: number of truncated conversations.
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
    null_records: int = 0
    kind: TokenKind = "text"
    sequence_tokens: int | None = None
    dropped: int = 0
    truncated: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """One split as arrays mapped from disk.

    Attributes:
        tokens: every document, each followed by the end of text.
        bounds: document i is ``tokens[bounds[i] : bounds[i + 1]]``.
        answers: for each token whether it is learnt; None where all are.
        packs: of conversations: the first one of each sequence, and the answer tokens before it.
    """

    tokens: TokenArray
    bounds: NDArray[np.int64]
    answers: NDArray[np.uint8] | None = None
    packs: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Corpus:
    """A prepared folder, open for reading."""

    folder: Path
    manifest: CorpusManifest
    train: Split
    validation: Split

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the ids, loaded from the folder."""
        return load_tokenizer(self.folder / "tokenizer.json")


def open_corpus(folder: Path) -> Corpus:
    """Open a prepared folder for reading. Any number of processes may open it.

    Raises:
        DataError: the folder is not prepared, or its files differ from the manifest.
    """
    try:
        manifest = CorpusManifest(**json.loads((folder / "corpus.json").read_text(encoding="utf-8")))
        if manifest.format != FORMAT:
            raise ValueError(f"format {manifest.format}, not {FORMAT}")
        train, validation = (_open_split(folder, split, manifest) for split in SPLITS)
        (folder / "tokenizer.json").stat()
    except (OSError, EOFError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"data.cache: '{folder}' holds no whole corpus ({error}); prepare it again.") from None
    return Corpus(folder, manifest, train, validation)


def _open_split(folder: Path, split: SplitName, manifest: CorpusManifest) -> Split:
    # Maps read nothing yet: lengths are checked here, pages are read on use.
    tokens: TokenArray = np.memmap(folder / f"{split}.tokens", manifest.dtype, "r")
    bounds: NDArray[np.int64] = np.load(folder / f"{split}.index", mmap_mode="r")
    stated = manifest.train_tokens if split == "train" else manifest.validation_tokens
    if not len(tokens) == bounds[-1] == stated:
        raise ValueError(f"{split} has {len(tokens)} tokens, its index ends at {bounds[-1]}, not at {stated}")
    if manifest.kind == "text":
        return Split(tokens, bounds)
    answers: NDArray[np.uint8] = np.memmap(folder / f"{split}.answers", np.uint8, "r")
    packs: NDArray[np.int64] = np.load(folder / f"{split}.packs", mmap_mode="r")
    if len(answers) != len(tokens) or packs[-1, 0] != len(bounds) - 1:
        raise ValueError(f"{split} has {len(answers)} marks for {len(tokens)} tokens")
    return Split(tokens, bounds, answers, packs)


def is_whole(folder: Path) -> bool:
    """Whether the folder holds a complete corpus."""
    try:
        open_corpus(folder)
    except DataError:
        return False
    return True

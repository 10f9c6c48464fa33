"""Writes the files of a prepared corpus: under temporary names, renamed together at the end."""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from superstep.data.batch import SPLITS, SplitName
from superstep.data.interruptible import run_aside
from superstep.data.shuffle import mix64
from superstep.data.token_files import FILES, FORMAT, CorpusManifest, TokenArray
from superstep.data.tokenizer import Tokenizer

BLOCK_TOKENS = 1 << 22
"""Tokens that are counted at once."""

_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document that is encoded at once."""

    text: str
    document: int
    is_last: bool


def hold_out(document_numbers: list[int], fraction: float) -> list[bool]:
    """Whether each document is held out: whether the hash of its number is below the fraction."""
    hashes = mix64(np.array(document_numbers, np.uint64))
    return [bool(is_below) for is_below in hashes < np.uint64(int(fraction * 2.0**64))]


def publish(folder: Path, names: Sequence[str], suffix: str) -> None:
    """Rename files, the manifest last; until then the folder holds no corpus."""
    for name in names:
        with (folder / f"{name}{suffix}").open("rb+") as file:
            os.fsync(file.fileno())
    (folder / "corpus.json").unlink(missing_ok=True)
    for name in names:
        (folder / f"{name}{suffix}").replace(folder / name)


class PartialFiles:
    """The files of a corpus under temporary names, until ``publish`` renames them."""

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

    def estimate_bytes(self, source_bytes: int) -> int:
        """Approximate size of the token files; before any text is encoded, two bytes of text a token."""
        tokens = self.tokens("train") + self.tokens("validation")
        tokens_per_byte = tokens / self.text_bytes if self.text_bytes else 0.5
        return round(source_bytes * tokens_per_byte) * np.dtype(self.dtype).itemsize

    def open(self, stack: ExitStack) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            self._streams[split] = stack.enter_context(self.path(f"{split}.tokens").open("wb"))

    def append(self, block: Sequence[Passage], validation_fraction: float) -> None:
        """Encode and write the next passages, each to the split of its document."""
        encoded = run_aside(lambda: self.tokenizer.encode_batch([passage.text for passage in block]))
        are_held_out = hold_out([passage.document for passage in block], validation_fraction)
        for passage, ids, is_held_out in zip(block, encoded, are_held_out, strict=True):
            split: SplitName = "validation" if is_held_out else "train"
            written = [*ids, self.tokenizer.end_of_text] if passage.is_last else ids
            self._streams[split].write(np.array(written, self.dtype).tobytes())
            self._tokens[split] += len(written)
            self.text_bytes += len(passage.text.encode())
            if passage.is_last:
                self._bounds[split].append(self._tokens[split])

    def hold_out_tail(self, validation_fraction: float) -> None:
        """Move the end of train to validation if documents are less than half of the wanted share."""
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

    def finish(self, fingerprint: str, null_records: int) -> None:
        """Write the files beside the tokens: indexes, tokenizer, manifest."""
        for split in SPLITS:
            with self.path(f"{split}.index").open("wb") as file:
                np.save(file, np.array(self._bounds[split], np.int64))
        self.tokenizer.save(self.path("tokenizer.json"))
        manifest = json.dumps(asdict(self._manifest(fingerprint, null_records)), indent=2)
        self.path("corpus.json").write_text(manifest + "\n", encoding="utf-8")

    def publish(self) -> None:
        """Rename all files. The manifest only ever describes the files in place."""
        publish(self.folder, FILES, _PARTIAL)

    def discard(self) -> None:
        for name in FILES:
            with suppress(OSError):  # called after another failure
                self.path(name).unlink()

    def _manifest(self, fingerprint: str, null_records: int) -> CorpusManifest:
        train, validation = self._counts("train"), self._counts("validation")
        nats_of_id = np.log(train.sum() + len(train)) - np.log(train + 1)
        return CorpusManifest(
            format=FORMAT,
            fingerprint=fingerprint,
            dtype=self.dtype,
            vocab=self.tokenizer.vocab,
            end_of_text=self.tokenizer.end_of_text,
            train_tokens=self.tokens("train"),
            train_documents=len(self._bounds["train"]) - 1,
            validation_tokens=self.tokens("validation"),
            validation_documents=len(self._bounds["validation"]) - 1,
            text_bytes=self.text_bytes,
            bytes_per_token=self.text_bytes / (self.tokens("train") + self.tokens("validation")),
            unigram_nats=float(nats_of_id @ validation / validation.sum()),
            null_records=null_records,
        )

    def _counts(self, split: SplitName) -> NDArray[np.int64]:
        """Occurrences of each id in the split."""
        tokens: TokenArray = np.memmap(self.path(f"{split}.tokens"), self.dtype, "r")
        counts = np.zeros(self.tokenizer.vocab, np.int64)
        for start in range(0, len(tokens), BLOCK_TOKENS):
            counts += np.bincount(tokens[start : start + BLOCK_TOKENS], minlength=len(counts))
        return counts

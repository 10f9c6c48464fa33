"""Writes the files of prepared conversations: first in the order of their records, then in that of their packed
sequences.

    samples ──► train.heap, validation.heap      ids and marks, as they arrive
            ──► pack                             which conversations share a sequence
            ──► train.tokens, .index, ...        one sequence after the other
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from superstep.data.batch import SPLITS, SplitName
from superstep.data.packing import pack
from superstep.data.token_files import (
    ANSWER_FILES,
    FILES,
    FORMAT,
    MEDIA_FILES,
    MEDIA_SETTINGS,
    CorpusManifest,
    TokenKind,
)
from superstep.data.token_writer import hold_out, publish
from superstep.data.tokenizer import Tokenizer

HEAPS = tuple(f"{split}.{kind}" for split in SPLITS for kind in ("heap", "marks"))
_PARTIAL = ".partial"


class AnswerFiles:
    """Conversations under temporary names, until ``publish`` renames their files.

    Args:
        folder: for the files.
        tokenizer: of the model.
        sequence_tokens: of the packed sequences.
        packed: whether several may share one.
        kind: of an item: one conversation, or the two of a preference.
        media: how pictures or sounds are read, as JSON; None for conversations of text.

    Attributes:
        dropped: number of conversations that were too long and are left out.
        truncated: number of truncated conversations.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        sequence_tokens: int,
        *,
        packed: bool,
        kind: TokenKind,
        media: str | None = None,
    ) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        self._sequence_tokens = sequence_tokens
        self._packed = packed
        self._kind = kind
        self._settings = media
        self._media: dict[SplitName, list[str]] = {split: [] for split in SPLITS}
        self._dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
        self._streams: dict[str, IO[bytes]] = {}
        self._sizes: dict[SplitName, array[int]] = {split: array("q") for split in SPLITS}
        self._items: dict[SplitName, array[int]] = {split: array("q") for split in SPLITS}
        self._answers: dict[SplitName, NDArray[np.int64]] = {}
        self._answer_bytes = 0
        self.dropped = 0
        self.truncated = 0

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{_PARTIAL}"

    def items(self, split: SplitName) -> int:
        """Items of the split so far."""
        return len(self._items[split])

    def summary(self) -> str:
        """A summary in words."""
        return f"{self.items('train') + self.items('validation')} fit, {self.dropped} were dropped"

    def estimate_bytes(self, source_bytes: int) -> int:
        """Approximate size of the files: text has three bytes a token or more, and each is there twice."""
        return 2 * (source_bytes // 3) * (np.dtype(self._dtype).itemsize + 1)

    def open(self, stack: ExitStack) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in HEAPS:
            self._streams[name] = stack.enter_context(self.path(name).open("wb"))

    def append(
        self,
        number: int,
        item: Sequence[tuple[Sequence[int], bytes]],
        fraction: float,
        answer_bytes: int,
        media: str = "[]",
    ) -> None:
        """Write an item: conversations that stay in one sequence, each with its ids and marks. The hash of the record's
        number decides whether it is held out. ``media`` lists the pictures or sounds of the item, as JSON.
        """
        split: SplitName = "validation" if hold_out([number], fraction)[0] else "train"
        for ids, marks in item:
            self._streams[f"{split}.heap"].write(np.array(ids, self._dtype).tobytes())
            self._streams[f"{split}.marks"].write(marks)
            self._sizes[split].append(len(ids))
        self._items[split].append(len(item))
        if self._settings is not None:
            self._media[split].append(media)
        self._answer_bytes += answer_bytes

    def hold_out_one(self) -> None:
        """Move the last item to validation if none was held out."""
        if self.items("validation") or self.items("train") < 2:
            return
        count = self._items["train"].pop()
        if self._settings is not None:
            self._media["validation"].append(self._media["train"].pop())
        sizes = [self._sizes["train"].pop() for _ in range(count)][::-1]
        self._items["validation"].append(count)
        self._sizes["validation"].extend(sizes)
        for kind, width in (("heap", np.dtype(self._dtype).itemsize), ("marks", 1)):
            source = self._streams[f"train.{kind}"]
            source.flush()
            cut = source.tell() - width * sum(sizes)
            with self.path(f"train.{kind}").open("rb") as written:
                written.seek(cut)
                self._streams[f"validation.{kind}"].write(written.read())
            source.truncate(cut)

    def arrange(self) -> None:
        """Pack, and write each split in the order of its sequences. The streams are closed by then."""
        for split in SPLITS:
            bounds = np.concatenate(([0], np.cumsum(self._sizes[split], dtype=np.int64))).astype(np.int64)
            firsts = np.concatenate(([0], np.cumsum(self._items[split], dtype=np.int64))).astype(np.int64)
            # A conversation's last token is a target only.
            sizes = (bounds[firsts[1:]] - bounds[firsts[:-1]] - np.diff(firsts)).tolist()
            packs = pack(sizes, self._sequence_tokens) if self._packed else [[item] for item in range(len(sizes))]
            self._write(split, bounds, firsts, packs)

    def _write(
        self, split: SplitName, bounds: NDArray[np.int64], firsts: NDArray[np.int64], packs: list[list[int]]
    ) -> None:
        ids = _map_file(self.path(f"{split}.heap"), self._dtype)
        marks = _map_file(self.path(f"{split}.marks"), "uint8")
        counts = np.zeros(self._tokenizer.vocab, np.int64)
        index, table, conversations, answers = array("q", [0]), array("q", [0, 0]), 0, 0
        with (
            self.path(f"{split}.tokens").open("wb") as tokens_file,
            self.path(f"{split}.answers").open("wb") as answers_file,
        ):
            for items in packs:
                for number in (n for item in items for n in range(firsts[item], firsts[item + 1])):
                    part = slice(int(bounds[number]), int(bounds[number + 1]))
                    tokens_file.write(ids[part].tobytes())
                    answers_file.write(marks[part].tobytes())
                    learnt = ids[part][marks[part] > 0]
                    counts += np.bincount(learnt, minlength=len(counts))
                    index.append(index[-1] + part.stop - part.start)
                    conversations += 1
                    answers += len(learnt)
                table.extend((conversations, answers))
        self._answers[split] = counts
        for name, values in ((f"{split}.index", np.array(index)), (f"{split}.packs", np.array(table).reshape(-1, 2))):
            with self.path(name).open("wb") as file:
                np.save(file, values)

    def finish(self, fingerprint: str, chat: Mapping[str, Any]) -> None:
        """Write the other files: the tokenizer, the rendering of chats, the manifest."""
        self._tokenizer.save(self.path("tokenizer.json"))
        self.path("chat.json").write_text(json.dumps(chat, indent=2) + "\n", encoding="utf-8")
        train, validation = self._answers["train"], self._answers["validation"]
        learnt = int(train.sum() + validation.sum())
        nats_of_id = np.log(train.sum() + len(train)) - np.log(train + 1)
        manifest = CorpusManifest(
            format=FORMAT,
            fingerprint=fingerprint,
            dtype=self._dtype,
            vocab=self._tokenizer.vocab,
            end_of_text=self._tokenizer.end_of_text,
            train_tokens=sum(self._sizes["train"]),
            train_documents=len(self._sizes["train"]),
            validation_tokens=sum(self._sizes["validation"]),
            validation_documents=len(self._sizes["validation"]),
            text_bytes=self._answer_bytes,
            bytes_per_token=max(self._answer_bytes, 1) / max(learnt, 1),
            unigram_nats=float(nats_of_id @ validation / max(validation.sum(), 1)),
            kind=self._kind,
            sequence_tokens=self._sequence_tokens,
            dropped=self.dropped,
            truncated=self.truncated,
        )
        self.path("corpus.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")

    def _write_media(self, settings: str) -> None:
        for split, lines in self._media.items():
            self.path(f"{split}.media").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self.path(MEDIA_SETTINGS).write_text(settings, encoding="utf-8")

    def publish(self) -> None:
        """Rename all files."""
        for name in HEAPS:
            self.path(name).unlink()
        if self._settings is not None:
            self._write_media(self._settings)
        for name in MEDIA_FILES:  # of an earlier preparation
            (self.folder / name).unlink(missing_ok=True)
        media = () if self._settings is None else MEDIA_FILES
        publish(self.folder, (*media, *ANSWER_FILES, *FILES), _PARTIAL)

    def discard(self) -> None:
        for name in (*HEAPS, *MEDIA_FILES, *ANSWER_FILES, *FILES):
            with suppress(OSError):  # called after another failure
                self.path(name).unlink()


def _map_file(path: Path, dtype: str) -> NDArray[Any]:
    """A file as an array; an empty one cannot be mapped."""
    mapped: NDArray[Any] = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
    return mapped

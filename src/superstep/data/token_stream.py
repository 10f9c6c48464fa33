"""Stream: one split of a corpus as global batches, at any position.

The position is one cursor: the number of samples consumed since the start. With n sequences in an epoch, sample s is
sequence ``permute(s mod n)`` of epoch ``s div n``. So the next batch depends on the seed and the cursor alone, never on
the number of ranks::

    cursor 30, 4 sequences in the batch      rank 0 of 2        rank 1 of 2
    samples 30 31 32 33                      rows 0:2 = 30 31   rows 2:4 = 32 33

With a document mask a packed sequence is several documents, each as if it stood alone: every token has the place where
its document starts, and the last token of a document has no target, since nothing that it attends to predicts the next
document::

    bounds of the stream  ... 5 8 ...    sequence of tokens 4 to 11      place   0 1 2 3 4 5 6 7
                                         documents a, b, c               token   a b b b c c c c
                                                                         starts  0 1 1 1 4 4 4 4
                                                                         target  - b b - c c c c

Dims: B the requested rows, S sequence_tokens, N any number of sequences.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superstep.data.batch import TOKENS, Batch, SplitName
from superstep.data.conversation_stream import AnswerCut
from superstep.data.shuffle import order_at
from superstep.data.token_files import Corpus, Split
from superstep.numerics.loss import IGNORE
from superstep.plan.config import RunConfig


class SequenceCut(Protocol):
    """A split cut into numbered sequences."""

    @property
    def sequences(self) -> int: ...

    def read(self, number: int, tokens_S: NDArray[np.int64], targets_S: NDArray[np.int64]) -> None:
        """Write the ids of a sequence and its targets; padding and its IGNORE are there already."""
        ...

    def valid_tokens(self, numbers_N: NDArray[np.int64]) -> int:
        """Total targets with a loss in these sequences, computed without reading tokens."""
        ...


class PackedCut:
    """One stream of documents, cut every S tokens. A sequence's last target is the next one's first token.

    Args:
        split: the stream.
        sequence_tokens: S.
        is_masked: whether the last token of a document has no target.
    """

    def __init__(self, split: Split, sequence_tokens: int, *, is_masked: bool = False) -> None:
        self._tokens = split.tokens
        self._bounds = split.bounds
        self._length = sequence_tokens
        self._is_masked = is_masked
        self.sequences = (len(split.tokens) - 1) // sequence_tokens

    def read(self, number: int, tokens_S: NDArray[np.int64], targets_S: NDArray[np.int64]) -> None:
        start = number * self._length
        tokens_S[:] = self._tokens[start : start + self._length]
        targets_S[:] = self._tokens[start + 1 : start + 1 + self._length]
        if self._is_masked:
            first, stop = self._bounds_after(np.array([start]))
            targets_S[self._bounds[first[0] : stop[0]] - start - 1] = IGNORE

    def valid_tokens(self, numbers_N: NDArray[np.int64]) -> int:
        total = len(numbers_N) * self._length
        if not self._is_masked:
            return total
        first_N, stop_N = self._bounds_after(numbers_N * self._length)
        return total - int((stop_N - first_N).sum())

    def starts(self, number: int) -> NDArray[np.int64]:
        """The start of each token's document within the sequence: 0 for one that continues from the sequence before."""
        start = number * self._length
        first, stop = self._bounds_after(np.array([start]))
        places = self._bounds[first[0] : stop[0]] - start
        starts_S = np.zeros(self._length, np.int64)
        inside = places[places < self._length]
        starts_S[inside] = inside
        return np.maximum.accumulate(starts_S)

    def _bounds_after(self, starts_N: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """For sequences by their first tokens: the bounds between it and the start of the next sequence, as a range.

        A bound at the sequence's first token ends no document in it, one at the next sequence's does.
        """
        first_N = np.searchsorted(self._bounds, starts_N, side="right")
        return first_N, np.searchsorted(self._bounds, starts_N + self._length, side="right")


class DocumentCut:
    """Each document on its own, cut every S tokens, the last piece padded.

    A document of L tokens has L - 1 tokens with a target, hence ceil((L - 1) / S) pieces, each with a target.
    """

    def __init__(self, split: Split, sequence_tokens: int) -> None:
        self._split = split
        self._length = sequence_tokens
        targets = np.diff(split.bounds) - 1
        self._targets = targets
        self._pieces_before = np.concatenate(([0], np.cumsum(-(-targets // sequence_tokens))))
        self.sequences = int(self._pieces_before[-1])

    def read(self, number: int, tokens_S: NDArray[np.int64], targets_S: NDArray[np.int64]) -> None:
        documents, starts, targets = self.locate(np.array([number]))
        start, valid = int(self._split.bounds[documents[0]] + starts[0]), int(targets[0])
        piece = self._split.tokens[start : start + valid + 1]
        tokens_S[:valid] = piece[:-1]
        targets_S[:valid] = piece[1:]

    def valid_tokens(self, numbers_N: NDArray[np.int64]) -> int:
        return int(self.locate(numbers_N)[2].sum())

    def locate(self, numbers_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """For each piece: its document, its start within the document, and its number of targets."""
        documents_N = np.searchsorted(self._pieces_before, numbers_N, side="right") - 1
        starts_N = (numbers_N - self._pieces_before[documents_N]) * self._length
        return documents_N, starts_N, np.minimum(self._targets[documents_N] - starts_N, self._length)


class TokenStream:
    """One split of a corpus as global batches. Reading changes nothing: any batch can be read at any time."""

    def __init__(
        self,
        corpus: Corpus,
        split: SplitName,
        *,
        sequence_tokens: int,
        packed: bool,
        batch_sequences: int,
        seed: int,
        document_mask: bool = False,
    ) -> None:
        files = corpus.train if split == "train" else corpus.validation
        packed_cut: PackedCut | AnswerCut | None = None
        if files.packs is not None:
            self._cut: SequenceCut = (answer_cut := AnswerCut(files, sequence_tokens))
            packed_cut = answer_cut if packed else None
        elif packed:
            self._cut = packed_cut = PackedCut(files, sequence_tokens, is_masked=document_mask)
        else:
            self._cut = DocumentCut(files, sequence_tokens)
        # Without packing a sequence has one document, and needs no mask.
        self._masked = packed_cut if document_mask else None
        self._padding = corpus.manifest.end_of_text
        self._is_shuffled = split == "train"
        self._seed = seed
        self.sequence_tokens = sequence_tokens
        self.batch_sequences = batch_sequences
        assert self.sequences > 0, f"{split} has no {sequence_tokens} tokens and a target; prepare refuses that"

    @property
    def sequences(self) -> int:
        """Number of distinct sequences of an epoch."""
        return self._cut.sequences

    def batch(self, sample: int, rows: slice) -> Batch:
        """Rows of the global batch at cursor ``sample``. A batch may span epochs."""
        numbers = self.numbers(sample)
        chosen = numbers[rows]
        tokens_BS = np.full((len(chosen), self.sequence_tokens), self._padding, np.int64)
        targets_BS = np.full_like(tokens_BS, IGNORE)
        for row, number in enumerate(chosen):
            self._cut.read(int(number), tokens_BS[row], targets_BS[row])
        return Batch(
            fields={TOKENS: torch.from_numpy(tokens_BS)},
            targets_BS=torch.from_numpy(targets_BS),
            valid_tokens=self._cut.valid_tokens(numbers),
            starts_BS=self._starts(chosen),
        )

    def _starts(self, numbers: NDArray[np.int64]) -> Tensor | None:
        if self._masked is None:
            return None
        rows = [self._masked.starts(int(number)) for number in numbers]
        return torch.from_numpy(np.stack(rows) if rows else np.empty((0, self.sequence_tokens), np.int64))

    def owners(self, sample: int) -> tuple[Tensor, int]:
        """The conversation of each learnt target of the whole global batch, [batch_sequences, S], from 0; -1 for
        others. And their number.
        """
        assert isinstance(self._cut, AnswerCut), "of conversations alone it is known"
        rows, before = [], 0
        for number in self.numbers(sample):
            owners_S, count = self._cut.owners(int(number))
            rows.append(np.where(owners_S >= 0, owners_S + before, -1))
            before += count
        return torch.from_numpy(np.stack(rows)), before

    def numbers(self, sample: int) -> NDArray[np.int64]:
        """The sequence numbers of the global batch: shuffled for training, in plain order for validation."""
        seed = self._seed if self._is_shuffled else None
        return order_at(sample, self.batch_sequences, self.sequences, seed=seed).numbers


def stream_of(config: RunConfig, corpus: Corpus, split: SplitName) -> TokenStream:
    """A split of the corpus with the run's settings."""
    return TokenStream(
        corpus,
        split,
        sequence_tokens=config.data.sequence_tokens,
        packed=config.data.packed,
        batch_sequences=config.train.batch_sequences,
        seed=config.train.seed,
        document_mask=config.data.document_mask,
    )

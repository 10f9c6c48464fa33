"""A stream in plain code: token by token from the token files, without ``data.token_stream``.

A row is three lists of S numbers: tokens, targets, and the start of each token's document within the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from superstep.data.batch import TOKENS, Batch
from superstep.data.token_files import Split
from superstep.numerics.loss import IGNORE
from superstep.plan.config import DataConfig

Row = tuple[list[int], list[int], list[int]]

MASK_64 = 2**64 - 1
ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSplit:
    """A split of a corpus as numbered rows.

    Attributes:
        split: tokens and document bounds.
        data: whether rows are packed or padded, and whether documents are separated.
        padding: the token after a document's end.
        seed: of the order; None keeps the order of the file, as in validation.
    """

    split: Split
    data: DataConfig
    padding: int
    seed: int | None

    @property
    def count(self) -> int:
        size, tokens = self.data.sequence_tokens, len(self.split.tokens)
        return (tokens - 1) // size if self.data.packed else int(self._pieces().sum())

    def rows(self, sample: int, count: int) -> list[Row]:
        """Rows of ``count`` samples from the ``sample``-th on, epoch after epoch."""
        return [self._row(number) for number in self._numbers(sample, count)]

    def batches(self, size: int, count: int) -> tuple[Batch, ...]:
        """The first global batches of ``size`` rows."""
        return tuple(self._batch(number * size, size) for number in range(count))

    def _batch(self, sample: int, size: int) -> Batch:
        tokens_BS, targets_BS, starts_BS = (torch.tensor(x) for x in zip(*self.rows(sample, size), strict=True))
        has_starts = self.data.packed and self.data.document_mask
        counted = int((targets_BS != IGNORE).sum())
        return Batch({TOKENS: tokens_BS}, targets_BS, counted, starts_BS if has_starts else None)

    def _numbers(self, sample: int, count: int) -> Iterator[int]:
        rows = self.count
        for place in range(sample, sample + count):
            epoch, position = divmod(place, rows)
            yield position if self.seed is None else shuffle(position, rows, self.seed, epoch)

    def _row(self, number: int) -> Row:
        return self._pack(number) if self.data.packed else self._pad(number)

    def _pack(self, number: int) -> Row:
        size = self.data.sequence_tokens
        first, bounds = number * size, self.split.bounds
        begins = set(bounds[(bounds >= first) & (bounds <= first + size)].tolist())
        ids = self.split.tokens[first : first + size + 1].tolist()
        targets, starts, start = ids[1:], [0] * size, 0
        for place in range(size) if self.data.document_mask else ():
            start = place if first + place in begins else start
            starts[place] = start
            if first + place + 1 in begins:
                targets[place] = IGNORE
        return ids[:-1], targets, starts

    def _pad(self, number: int) -> Row:
        size, pieces = self.data.sequence_tokens, self._pieces()
        document = int(np.repeat(np.arange(len(pieces)), pieces)[number])
        begin, end = self.split.bounds[document : document + 2].tolist()
        first = begin + size * (number - int(pieces[:document].sum()))
        ids = self.split.tokens[first : min(first + size + 1, end)].tolist()
        missing = size + 1 - len(ids)
        return ids[:-1] + [self.padding] * missing, ids[1:] + [IGNORE] * missing, [0] * size

    def _pieces(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Rows of each document: all its tokens but the last have a target."""
        return np.ceil((np.diff(self.split.bounds) - 1) / self.data.sequence_tokens).astype(np.int64)


def shuffle(position: int, count: int, seed: int, epoch: int) -> int:
    """The row at a position of an epoch's order: a Feistel network of ``ROUNDS`` rounds over the smallest domain of 4^h
    that holds ``count``, iterated while the result is outside (Luby and Rackoff 1988; Black and Rogaway 2002).
    """
    half = 1
    while 4**half < count:
        half += 1
    low = 2**half - 1
    key = _mix(_mix(seed & MASK_64) ^ (epoch & MASK_64))
    keys = [_mix(key ^ number) for number in range(ROUNDS)]
    while True:
        left, right = position >> half, position & low
        for each in keys:
            left, right = right, left ^ (_mix(right ^ each) >> (64 - half))
        position = left << half | right
        if position < count:
            return position


def _mix(word: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & MASK_64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK_64
    return word ^ (word >> 31)

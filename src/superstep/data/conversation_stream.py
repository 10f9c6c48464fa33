"""Conversations as sequences: each whole, several in a sequence, with a loss on answers alone.

Beside the token files of a corpus there are, for each split::

    train.answers   uint8, one for each token: 1 where it is learnt, 0 where it is context
    train.packs     int64 .npy [n + 1, 2]: the first conversation of each sequence, and the answer tokens before

Conversations are in the order of their sequences, so that a sequence is one range of the file. A conversation of L
tokens takes L - 1 places: its last token is a target only. With a document mask each is as if it stood alone::

    tokens of a, b   a0 a1 a2 a3 | b0 b1 b2      place   0  1  2  3  4  5
    answers           0  0  1  1    0  1  1      token   a0 a1 a2 b0 b1 .
                                                 target  .  a2 a3 b1 b2 .      a dot is padding, or has no loss
                                                 starts  0  0  0  3  3  5

Dims: S sequence_tokens, N any number of sequences.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from superstep.data.token_files import Split
from superstep.numerics.loss import IGNORE


class AnswerCut:
    """A split of conversations, cut into its packed sequences.

    Args:
        split: the conversations.
        sequence_tokens: S, for which they were packed.
    """

    def __init__(self, split: Split, sequence_tokens: int) -> None:
        assert split.answers is not None
        assert split.packs is not None
        self._tokens = split.tokens
        self._answers = split.answers
        self._bounds = split.bounds
        self._packs = split.packs
        self._length = sequence_tokens
        self.sequences = len(split.packs) - 1

    def read(self, number: int, tokens_S: NDArray[np.int64], targets_S: NDArray[np.int64]) -> None:
        for start, stop, place in self._conversations(number):
            size = stop - start - 1
            tokens_S[place : place + size] = self._tokens[start : stop - 1]
            targets = self._tokens[start + 1 : stop].astype(np.int64)
            targets_S[place : place + size] = np.where(self._answers[start + 1 : stop], targets, IGNORE)

    def valid_tokens(self, numbers_N: NDArray[np.int64]) -> int:
        before = self._packs[:, 1]
        return int((before[numbers_N + 1] - before[numbers_N]).sum())

    def owners(self, number: int) -> tuple[NDArray[np.int64], int]:
        """For each learnt target the index of its conversation in the sequence, -1 elsewhere; and their number."""
        owners_S = np.full(self._length, -1, np.int64)
        conversations = self._conversations(number)
        for k, (start, stop, place) in enumerate(conversations):
            owners_S[place : place + stop - start - 1] = np.where(self._answers[start + 1 : stop], k, -1)
        return owners_S, len(conversations)

    def starts(self, number: int) -> NDArray[np.int64]:
        """The start of each token's conversation within the sequence; the padding is one of its own."""
        starts_S = np.zeros(self._length, np.int64)
        end = 0
        for start, stop, place in self._conversations(number):
            end = place + stop - start - 1
            starts_S[place:end] = place
        starts_S[end:] = end
        return starts_S

    def _conversations(self, number: int) -> list[tuple[int, int, int]]:
        """For each conversation of a sequence: its first token, one past its last one, and its place there."""
        first, last = self._packs[number, 0], self._packs[number + 1, 0]
        bounds = self._bounds[first : last + 1].tolist()
        origin = bounds[0]
        return [(start, stop, start - origin - k) for k, (start, stop) in enumerate(pairwise(bounds))]

"""Ragged: batches with some ignored targets, which show a wrong divisor.

A packed batch has equally many targets on every rank and in every microbatch; division by one rank's number, or by the
mean, would make no difference. Here each row of a global batch ends a little earlier than the one before it:

    row 0   ● ● ● ● ● ● ● ○        ● a target that counts
    row 1   ● ● ● ● ● ● ○ ○        ○ one that is ignored
    row 2   ● ● ● ● ● ○ ○ ○
    row 3   ● ● ● ● ○ ○ ○ ○

If each sample has one class number, the targets of rows 1, 4, 9, 16, ... of the batch are ignored. Floating-point
targets all count.

With a document mask, documents also begin inside each row, at different places in every row and step. A batch of two
steps may lie within one long document, and there an engine without any mask would be correct.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

import torch

from superstep.data.batch import Batch, BatchSource
from superstep.numerics.loss import IGNORE
from superstep.plan.sample_fields import NUMBER, TARGET

CUTS = 3
"""Documents that begin within an odd row; an even row has one less."""

STRIDE = 19
"""Shift of their starts from row to row, in tokens."""


class Divided:
    """A source of batches with additional document starts. Without a document mask it changes nothing, nor where rows
    hold several samples, as these begin within each row anyway.
    """

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self.batch_sequences = source.batch_sequences

    def batch(self, sample: int, rows: slice) -> Batch:
        """Rows of the global batch at cursor ``sample``."""
        whole = self._source.batch(sample, slice(0, self.batch_sequences))
        if whole.starts_BS is None or TARGET + NUMBER in whole.fields:
            return whole.rows(rows)
        targets_BS, starts_BS = whole.targets_BS.clone(), whole.starts_BS.clone()
        tokens = starts_BS.shape[1]
        for row in range(self.batch_sequences):
            for place in _cuts(sample + row, tokens):
                # The rest of the document becomes a document of its own, up to the same end.
                rest = starts_BS[row, place:]
                rest[rest < place] = place
                targets_BS[row, place - 1] = IGNORE
        ignored = int(((whole.targets_BS != IGNORE) & (targets_BS == IGNORE)).sum())
        counted = whole.valid_tokens - ignored
        return replace(whole, targets_BS=targets_BS, starts_BS=starts_BS, valid_tokens=counted).rows(rows)


def documents_begun(batch: Batch) -> int:
    """Documents that begin within a row."""
    if batch.starts_BS is None:
        return 0
    return int((batch.starts_BS == torch.arange(batch.starts_BS.shape[1]))[:, 1:].sum())


def _cuts(sample: int, tokens: int) -> set[int]:
    """Document starts in the row of a sample, never its first token."""
    if tokens < 2:
        return set()
    count = CUTS - (sample + 1) % 2
    return {1 + (tokens * cut // CUTS + STRIDE * sample) % (tokens - 1) for cut in range(count)}


class Ragged:
    """A source of batches that ignores the last targets of rows: half of the last row. The number depends on a sample's
    place in the batch, so that any rank may read any rows. With a document mask they are ``Divided``.
    """

    def __init__(self, source: BatchSource) -> None:
        self._source = Divided(source)
        self.batch_sequences = source.batch_sequences

    def batch(self, sample: int, rows: slice) -> Batch:
        """Rows of the global batch at cursor ``sample``."""
        whole = self._source.batch(sample, slice(0, self.batch_sequences))
        if whole.targets_BS.is_floating_point():
            return whole.rows(rows)
        targets_BS = whole.targets_BS.clone()
        for row in range(self.batch_sequences):
            place = (sample + row) % self.batch_sequences
            if targets_BS.ndim == 1:
                targets_BS[row] = IGNORE if place and isqrt(place) ** 2 == place else targets_BS[row]
            else:
                tokens = targets_BS.shape[1]
                targets_BS[row, tokens - tokens * (place + 1) // (2 * self.batch_sequences) :] = IGNORE
        ignored = int(((whole.targets_BS != IGNORE) & (targets_BS == IGNORE)).sum())
        # The source's own count, minus the targets ignored here: a wrong count stays wrong.
        return replace(whole, targets_BS=targets_BS, valid_tokens=whole.valid_tokens - ignored).rows(rows)


def make_ragged_batches(source: BatchSource, steps: int) -> tuple[Batch, ...]:
    """Whole global batches of the first steps, ``Ragged``."""
    ragged = Ragged(source)
    size = ragged.batch_sequences
    return tuple(ragged.batch(step * size, slice(0, size)) for step in range(steps))

"""Ragged: the batches of a stream with part of their targets ignored, so that a wrong divisor shows.

A packed batch has as many targets on every rank and in every microbatch; dividing by one's own number, or by the mean
of them, would change nothing. Here each row of a global batch ends a little earlier than the one before it:

    row 0   ● ● ● ● ● ● ● ○        ● a target that counts
    row 1   ● ● ● ● ● ● ○ ○        ○ one that is ignored
    row 2   ● ● ● ● ● ○ ○ ○
    row 3   ● ● ● ● ○ ○ ○ ○
"""

from __future__ import annotations

from dataclasses import replace

from superstep.data.stream import Batch, Source
from superstep.numerics.loss import IGNORE


class Ragged:
    """A source of batches, of whose rows the last targets are ignored: of the last row half. Where a sample lies in a
    batch decides how many, so that any rank may read any rows.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.batch_sequences = source.batch_sequences

    def batch(self, sample: int, rows: slice) -> Batch:
        """These rows of the global batch that starts at cursor ``sample``."""
        whole = self._source.batch(sample, slice(0, self.batch_sequences))
        targets_BS = whole.targets_BS.clone()
        tokens = targets_BS.shape[1]
        for row in range(self.batch_sequences):
            place = (sample + row) % self.batch_sequences
            targets_BS[row, tokens - tokens * (place + 1) // (2 * self.batch_sequences) :] = IGNORE
        ignored = int(((whole.targets_BS != IGNORE) & (targets_BS == IGNORE)).sum())
        # The source's own count, less what was taken away here: a count that is wrong stays wrong.
        return replace(whole, targets_BS=targets_BS, valid_tokens=whole.valid_tokens - ignored).rows(rows)

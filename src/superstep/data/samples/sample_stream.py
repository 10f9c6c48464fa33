"""One split of a file of samples as global batches, at any position, in the order of ``data.shuffle``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from superstep.data.batch import Batch, SplitName
from superstep.data.samples.ragged_rows import lay_row, pack_rows, starts_of
from superstep.data.samples.sample_file import SampleFile
from superstep.data.shuffle import Order, order_at
from superstep.plan.sample_fields import NUMBER, TARGET


class SampleStream:
    """One split as global batches. Reading changes nothing: any batch can be read at any time.

    Args:
        samples: the file.
        split: training is shuffled, validation in plain order.
        batch_sequences: rows of a global batch: samples, or packs of ragged ones.
        seed: of the order and of the samples' noise.
    """

    def __init__(self, samples: SampleFile, split: SplitName, *, batch_sequences: int, seed: int) -> None:
        self._samples = samples
        self._split: SplitName = split
        self._seed = seed
        self._rows = pack_rows(samples.sizes(split), samples.fields.capacities) if samples.size is not None else None
        self.batch_sequences = batch_sequences

    @property
    def sequences(self) -> int:
        """Rows of an epoch."""
        return self._samples.lengths[self._split] if self._rows is None else len(self._rows.samples)

    def batch(self, sample: int, rows: slice) -> Batch:
        """Rows of the global batch at cursor ``sample``. A batch may span epochs."""
        first, last, _ = rows.indices(self.batch_sequences)
        order = self._order(sample + first, last - first)
        read = [self._row(*place) for place in zip(order.epochs.tolist(), order.numbers.tolist(), strict=True)]
        whole = {name: torch.stack([one[name] for one in read]) for name in read[0]}
        targets = whole.pop(TARGET)
        if self._rows is None:
            count = self.batch_sequences * self._samples.fields.targets
            return Batch(whole, targets, count, reads=self._samples.fields.reads)
        count = int(self._rows.counted[self._order(sample, self.batch_sequences).numbers].sum())
        return Batch(whole, targets, count, starts_of(whole[TARGET + NUMBER]), reads=self._samples.fields.reads)

    def _order(self, sample: int, count: int) -> Order:
        return order_at(sample, count, self.sequences, seed=self._seed if self._is_shuffled else None)

    def _row(self, epoch: int, number: int) -> Mapping[str, Tensor]:
        """The fields of a row, with the target."""
        if self._rows is None:
            return self._samples.read(self._split, number, seed=self._seed, epoch=epoch)
        read = [self._samples.read(self._split, n, seed=self._seed, epoch=epoch) for n in self._rows.samples[number]]
        return lay_row(read, self._samples.fields)

    @property
    def _is_shuffled(self) -> bool:
        return self._split == "train"

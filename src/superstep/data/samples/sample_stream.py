"""One split of a file of samples as global batches, at any position, in the order of ``data.shuffle``."""

from __future__ import annotations

import torch

from superstep.data.batch import Batch, SplitName
from superstep.data.samples.sample_file import SampleFile
from superstep.data.shuffle import order_at
from superstep.plan.sample_fields import TARGET


class SampleStream:
    """One split as global batches. Reading changes nothing: any batch can be read at any time.

    Args:
        samples: the file.
        split: training is shuffled, validation in plain order.
        batch_sequences: samples of a global batch.
        seed: of the order and of the samples' noise.
    """

    def __init__(self, samples: SampleFile, split: SplitName, *, batch_sequences: int, seed: int) -> None:
        self._samples = samples
        self._split: SplitName = split
        self._seed = seed
        self.batch_sequences = batch_sequences

    @property
    def sequences(self) -> int:
        """Samples of an epoch."""
        return self._samples.lengths[self._split]

    def batch(self, sample: int, rows: slice) -> Batch:
        """Rows of the global batch at cursor ``sample``. A batch may span epochs."""
        order = order_at(sample, self.batch_sequences, self.sequences, seed=self._seed if self._is_shuffled else None)
        read = [
            self._samples.read(self._split, int(index), seed=self._seed, epoch=int(epoch))
            for epoch, index in zip(order.epochs[rows], order.numbers[rows], strict=True)
        ]
        whole = {field.name: torch.stack([one[field.name] for one in read]) for field in self._samples.fields.fields}
        targets = whole.pop(TARGET)
        count = self.batch_sequences * self._samples.fields.targets
        return Batch(whole, targets, count, reads=self._samples.fields.reads)

    @property
    def _is_shuffled(self) -> bool:
        return self._split == "train"

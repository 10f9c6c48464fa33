"""Samples in plain code: one by one from the user's file, in an order computed without ``data.shuffle``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.data.batch import Batch, SplitName
from superstep.data.samples.noise import noise_of
from superstep.data.samples.sample_file import SampleFile
from superstep.plan.sample_fields import TARGET
from superstep.train.proof.plain.plain_stream import shuffle


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSamples:
    """A split of a file of samples.

    Attributes:
        seed: of the run.
    """

    samples: SampleFile
    split: SplitName
    seed: int

    @property
    def count(self) -> int:
        return self.samples.lengths[self.split]

    def batches(self, size: int, count: int) -> tuple[Batch, ...]:
        """The first global batches of ``size`` samples."""
        return tuple(self.batch(number * size, size) for number in range(count))

    def batch(self, sample: int, size: int) -> Batch:
        """``size`` samples from the ``sample``-th on, epoch after epoch."""
        rows = list(self._rows(sample, size))
        fields = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        targets = fields.pop(TARGET)
        return Batch(fields, targets, targets.numel(), reads=self.samples.fields.reads)

    def _rows(self, sample: int, size: int) -> Iterator[dict[str, Tensor]]:
        for place in range(sample, sample + size):
            epoch, position = divmod(place, self.count)
            if self.split == "train":
                position = shuffle(position, self.count, self.seed, epoch)
            noise = noise_of(self.seed, self.split, epoch if self.split == "train" else 0, position)
            yield dict(self.samples.function(self.split, position, noise))


def sample_fault(batch: Batch, wanted: Batch, rows: slice) -> str:
    """The first difference between a rank's rows of a batch and the whole batch in plain code; empty without one."""
    if batch.valid_tokens != wanted.valid_tokens:
        return f"{batch.valid_tokens} targets are counted, and there are {wanted.valid_tokens}"
    for name, whole in (*wanted.fields.items(), (TARGET, wanted.targets_BS)):
        ours, plain = batch.targets_BS if name == TARGET else batch.fields[name], whole[rows]
        if len(ours) != len(plain):
            return f"{len(ours)} rows are read, and {len(plain)} are its own"
        for row, (one, other) in enumerate(zip(ours, plain, strict=True), rows.start):
            if not torch.equal(one, other):
                return f"row {row} of the batch: '{name}' is of another sample"
    return ""

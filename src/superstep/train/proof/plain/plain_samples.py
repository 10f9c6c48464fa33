"""Samples in plain code: one by one from the user's file, in an order computed without ``data.shuffle``."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch
from torch import Tensor

from superstep.data.batch import Batch, SplitName
from superstep.data.samples.noise import noise_of
from superstep.data.samples.sample_file import SampleFile
from superstep.numerics.loss import IGNORE
from superstep.plan.sample_fields import NUMBER, TARGET
from superstep.train.proof.plain.plain_stream import shuffle


@dataclass(frozen=True, kw_only=True)
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
        """Rows of an epoch."""
        return self.samples.lengths[self.split] if self.samples.size is None else len(self.packs)

    def batches(self, size: int, count: int) -> tuple[Batch, ...]:
        """The first global batches of ``size`` samples."""
        return tuple(self.batch(number * size, size) for number in range(count))

    def batch(self, sample: int, size: int) -> Batch:
        """``size`` samples from the ``sample``-th on, epoch after epoch."""
        rows = list(self._rows(sample, size))
        fields = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        targets = fields.pop(TARGET)
        starts = None if self.samples.size is None else _starts(fields[TARGET + NUMBER].tolist())
        return Batch(fields, targets, int((targets != IGNORE).sum()), starts, reads=self.samples.fields.reads)

    def _rows(self, sample: int, size: int) -> Iterator[dict[str, Tensor]]:
        count = self.count
        for place in range(sample, sample + size):
            epoch, position = divmod(place, count)
            if self.split == "train":
                position = shuffle(position, count, self.seed, epoch)
            if self.samples.size is None:
                yield self._sample(epoch, position)
            else:
                yield self._lay([self._sample(epoch, number) for number in self.packs[position]])

    def _sample(self, epoch: int, number: int) -> dict[str, Tensor]:
        noise = noise_of(self.seed, self.split, epoch if self.split == "train" else 0, number)
        return dict(self.samples.function(self.split, number, noise))

    @cached_property
    def packs(self) -> list[list[int]]:
        """The samples of each row: the largest first, each into the fullest row with room, of equally full ones into
        the last that became so; rows are in the order of their first samples.
        """
        room, sizes = self.samples.fields.capacities, self.samples.sizes(self.split)
        whole = lcm(*room.values())
        costs = [max(size[name] * whole // room[name] for name in room) for size in sizes]
        rows: list[tuple[int, int, list[int]]] = []  # room, minus the time of the last change, samples
        for time, number in enumerate(sorted(range(len(costs)), key=lambda n: -costs[n])):
            at = bisect_left(rows, (costs[number],))
            left, _, numbers = rows.pop(at) if at < len(rows) else (whole, 0, [])
            insort(rows, (left - costs[number], -time, [*numbers, number]))
        return sorted(sorted(numbers) for _, _, numbers in rows)

    def _lay(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """One row, by field, place by place."""
        row: dict[str, Tensor] = {}
        for name, room in self.samples.fields.capacities.items():
            values = [value for sample in samples for value in sample[name]]
            numbers = [number for number, sample in enumerate(samples) for _ in sample[name]]
            missing = room - len(values)
            empty = torch.zeros_like(samples[0][name][:1].sum(0)) + (IGNORE if name == TARGET else 0)
            row[name] = torch.stack([*values, *[empty] * missing])
            row[f"{name}{NUMBER}"] = torch.tensor([*numbers, *[-1] * missing])
        return row


def _starts(rows: list[list[int]]) -> Tensor:
    """For each place the first one of the same sample in its row."""
    starts = []
    for row in rows:
        first: dict[int, int] = {}
        starts.append([first.setdefault(number, place) for place, number in enumerate(row)])
    return torch.tensor(starts)


def sample_fault(batch: Batch, wanted: Batch, rows: slice) -> str:
    """The first difference between a rank's rows of a batch and the whole batch in plain code; empty without one."""
    if batch.valid_tokens != wanted.valid_tokens:
        return f"{batch.valid_tokens} targets are counted, and there are {wanted.valid_tokens}"
    read = {**batch.fields, TARGET: batch.targets_BS}
    expected = {**wanted.fields, TARGET: wanted.targets_BS}
    if wanted.starts_BS is not None:
        assert batch.starts_BS is not None
        read["start of the sample"], expected["start of the sample"] = batch.starts_BS, wanted.starts_BS
    for name, whole in expected.items():
        ours, plain = read[name], whole[rows]
        if len(ours) != len(plain):
            return f"{len(ours)} rows are read, and {len(plain)} are its own"
        for row, (one, other) in enumerate(zip(ours, plain, strict=True), rows.start):
            if not torch.equal(one, other):
                return f"row {row} of the batch: '{name}' is of another sample"
    return ""

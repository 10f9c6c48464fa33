"""Rows of ragged samples: whole samples one after another, up to a capacity for each field.

    CAPACITY = {"mel": 800, "target": 8}          the first dim of each field in a row
    def size(split, index): ...                   {"mel": 212, "target": 1}: the same of one sample

    row of three samples     mel          a a a a b b c c c c c c . .
                             mel.sample   0 0 0 0 1 1 2 2 2 2 2 2 - -
                             target       a b c .

A sample costs the largest share that it takes of any field's capacity; samples are packed by cost
(``superstep.data.packing``). Rows are packed once for each split, from the sizes alone, so they depend on the file and
on nothing else: not on the ranks, not on the step. In each epoch the order of rows is shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superstep.data.packing import pack
from superstep.errors import DataError, did_you_mean
from superstep.numerics.loss import IGNORE
from superstep.plan.sample_fields import NUMBER, TARGET, Field, SampleFields

COUNTED = "counted"
"""The name, beside fields in ``size``, of the number of targets with a loss; without it all targets have one."""

PADDING = -1
"""The number of the sample where a row has none."""

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a split.

    Attributes:
        samples: the numbers of each row's samples.
        counted: targets with a loss of each row, int64 [rows].
    """

    samples: Sequence[Sequence[int]]
    counted: NDArray[np.int64]


def as_field(name: str, values: Tensor) -> Field:
    """The description of a sample's field."""
    return Field(name, tuple(values.shape), str(values.dtype).removeprefix("torch."))


def find_row_fields(first: SampleFields, size: object, capacities: object, about: str) -> SampleFields:
    """The fields of a row.

    Args:
        first: the fields of the first sample.
        size: the file's function.
        capacities: the file's CAPACITY: the first dim of each field in a row.
        about: the file.

    Raises:
        DataError: there is no function, or CAPACITY does not fit the fields.
    """
    names, example = [each.name for each in first.fields], {"mel": 3000, TARGET: 16}
    if not callable(size):
        raise DataError(
            f"{about} has CAPACITY and no function 'size(split, index)'; let it give each sample's first dims."
        )
    if not isinstance(capacities, Mapping) or not all(type(room) is int and room > 0 for room in capacities.values()):
        raise DataError(f"{about}: CAPACITY is {capacities!r}; give the first dim of each field in a row: {example}.")
    if missing := [name for name in names if name not in capacities]:
        raise DataError(f"{about}: CAPACITY lacks the field '{missing[0]}'; add its first dim in a row.")
    if unknown := [name for name in capacities if name not in names]:
        raise DataError(f"{about}: CAPACITY has '{unknown[0]}', which is no field{did_you_mean(unknown[0], names)}")
    if scalars := [each.name for each in first.fields if not each.dims]:
        raise DataError(
            f"{about}: sample('train', 0) has '{scalars[0]}' without a dim, and several samples share a row; give it "
            "the first dim 1."
        )
    if len(first.target.dims) != 1 or first.target.dtype != "int64":
        raise DataError(
            f"{about}: the target is {first.target}, and that of ragged samples must be int64 with one dim, as padding "
            f"has the target {IGNORE}."
        )
    fields = tuple(replace(each, dims=(capacities[each.name], *each.dims[1:])) for each in first.fields)
    return replace(first, fields=fields, capacities=dict(capacities))


def check_ragged(sample: Mapping[str, Tensor], sizes: Sizes, fields: SampleFields, counted: int, where: str) -> None:
    """Check a sample against its sizes and the fields of a row; raises DataError."""
    for row in fields.fields:
        wanted, given = replace(row, dims=(sizes[row.name], *row.dims[1:])), as_field(row.name, sample[row.name])
        if given != wanted:
            raise DataError(
                f"{where} has '{row.name}' as {given}, and by its size and the first sample it is {wanted}; let size "
                "give the first dim, and all samples the same dims behind it."
            )
    if counted != count_targets(sizes):
        raise DataError(
            f"{where} has {counted} targets other than {IGNORE}, and its size counts {count_targets(sizes)}; let size "
            f"give their number as '{COUNTED}'."
        )


def check_sizes(given: object, capacities: Mapping[str, int], called: str) -> Sizes:
    """What the file's ``size`` gives for a sample; raises DataError."""
    wanted = {*capacities, COUNTED}
    if not isinstance(given, Mapping) or not {*capacities} <= {*given} <= wanted:
        fields = ", ".join(f"'{name}'" for name in capacities)
        raise DataError(f"{called} gives {given!r}; return a dict with the first dim of each field: {fields}.")
    for name, size in given.items():
        if type(size) is not int or size < 0:
            raise DataError(f"{called} gives '{name}' = {size!r}; give a whole number, at least 0.")
    for name, room in capacities.items():
        if given[name] > room:
            raise DataError(
                f"{called} gives '{name}' = {given[name]}, and a row has room for {room}; cut the sample, or raise "
                f"CAPACITY['{name}']."
            )
    if not any(given[name] for name in capacities):
        raise DataError(f"{called} gives 0 for every field; leave such samples out.")
    if given.get(COUNTED, 0) > given[TARGET]:
        raise DataError(f"{called} gives '{COUNTED}' = {given[COUNTED]} of {given[TARGET]} targets; count targets.")
    return given


def pack_rows(sizes: Sequence[Sizes], capacities: Mapping[str, int]) -> PackedRows:
    """Rows of samples that fit; equal sizes give equal rows on every machine."""
    whole = math.lcm(*capacities.values())
    shares = {name: whole // room for name, room in capacities.items()}
    packs = pack([max(one[name] * share for name, share in shares.items()) for one in sizes], whole)
    counted = [sum(count_targets(sizes[index]) for index in row) for row in packs]
    return PackedRows(packs, np.array(counted, np.int64))


def write_filled(sizes: Sequence[Sizes], capacities: Mapping[str, int]) -> str:
    """How full the rows of some samples are, in one line."""
    rows = len(pack_rows(sizes, capacities).samples)
    shares = {name: sum(one[name] for one in sizes) / (rows * room) for name, room in capacities.items()}
    parts = ", ".join(f"{share:.0%} of {name}" for name, share in shares.items())
    return f"{len(sizes):,} samples are packed into {rows:,} rows; filled are {parts}."


def count_targets(sizes: Sizes) -> int:
    """The targets of a sample with a loss."""
    return sizes.get(COUNTED, sizes[TARGET])


def lay_row(samples: Sequence[Mapping[str, Tensor]], fields: SampleFields) -> dict[str, Tensor]:
    """A row of samples, by field, with the number of the sample at each place."""
    row = {}
    for field in fields.fields:
        values = torch.full(field.dims, IGNORE if field.name == TARGET else 0, dtype=getattr(torch, field.dtype))
        numbers = torch.full(field.dims[:1], PADDING)
        start = 0
        for number, sample in enumerate(samples):
            stop = start + len(sample[field.name])
            values[start:stop] = sample[field.name]
            numbers[start:stop] = number
            start = stop
        row[field.name], row[f"{field.name}{NUMBER}"] = values, numbers
    return row


def starts_of(numbers: Tensor) -> Tensor:
    """The start of each place's sample in its row, int64 [B, S]; padding is like one more sample."""
    starts = torch.arange(numbers.shape[1]).repeat(len(numbers), 1)
    starts[:, 1:] *= numbers[:, 1:] != numbers[:, :-1]
    return starts.cummax(1).values

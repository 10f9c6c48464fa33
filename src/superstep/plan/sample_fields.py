"""The fields of a user's samples, as plain values: names, dims and dtypes, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Counts = Literal["tokens", "samples", "targets"]
"""What a run counts: tokens of text, samples if each has one target, or else the targets of samples."""

TARGET = "target"
"""The field that the loss compares the model's output with."""

NUMBER = ".sample"
"""The end of a field's name, such as ``mel.sample``, that numbers the samples of a row."""


def is_prepared_folder(source: str | None) -> bool:
    """Whether a ``data.source`` names a folder of prepared conversations, and not a Python file."""
    return source is not None and not source.endswith(".py")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of every sample of a run.

    Attributes:
        dims: of one sample.
        dtype: torch's name of it, such as ``float32``.
    """

    name: str
    dims: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.dims)}"

    @property
    def bytes(self) -> int:
        digits = "".join(filter(str.isdigit, self.dtype))
        return math.prod(self.dims) * (int(digits) // 8 if digits else 1)


class Placeholder(NamedTuple):
    """A token that stands for rows of another field, of which an encoder makes one row of the stream."""

    token: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFields:
    """The fields of a run's samples, and so of the rows of a batch.

    A row is one sample, or, where samples are ragged, several. Then a field of a row has all of its samples one after
    another, and padding up to the field's capacity. One more field, ``mel.sample`` for ``mel``, has the number of the
    sample in the row at each place, int64, and -1 in the padding.

    Attributes:
        fields: of a sample; of a ragged one the first dim is the capacity of a row.
        reads: the field that the first unit reads.
        capacities: the first dim of a row, by field; empty where each row is one sample.
        placeholders: the tokens that stand for rows of a field, by field.
    """

    fields: tuple[Field, ...]
    reads: str
    capacities: Mapping[str, int] = field(default_factory=dict)
    placeholders: Mapping[str, Placeholder] = field(default_factory=dict)

    @property
    def inputs(self) -> Iterator[Field]:
        """The fields of a row that units may read."""
        for each in self.fields:
            if each.name != TARGET:
                yield each
            if self.capacities:
                yield Field(f"{each.name}{NUMBER}", each.dims[:1], "int64")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the batch, with its target."""
        return sum(each.bytes for each in self.inputs) + self.target.bytes

    def __getitem__(self, name: str) -> Field:
        return next(each for each in self.fields if each.name == name)

    @property
    def input(self) -> Field:
        """What the first unit reads."""
        return self[self.reads]

    @property
    def target(self) -> Field:
        return self[TARGET]

    @property
    def targets(self) -> int:
        """Targets of a sample: 1 for a class number."""
        return math.prod(self.target.dims)

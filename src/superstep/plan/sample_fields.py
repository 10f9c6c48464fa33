"""The fields of a user's samples, as plain values: names, dims and dtypes, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Counts = Literal["tokens", "samples", "targets"]
"""What a run counts: tokens of text, samples if each has one target, or else the targets of samples."""

TARGET = "target"
"""The field that the loss compares the model's output with."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFields:
    """The fields of a run's samples.

    Attributes:
        fields: all of them, with ``target``.
        reads: the field that the first unit reads.
    """

    fields: tuple[Field, ...]
    reads: str

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

"""Batches: named fields of samples, and their targets.

A sample has named fields: ``tokens`` [S] in token files; in a user's file for example ``pixels`` [1, 28, 28]. A batch
has the same fields, with one row for each sample.

Dims: B the requested rows, S sequence_tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from torch import Tensor

SplitName = Literal["train", "validation"]

SPLITS: tuple[SplitName, ...] = ("train", "validation")

TOKENS = "tokens"
"""The field of token files."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows of a global batch.

    Attributes:
        fields: by name, [B, ...]: ``tokens`` are int64 ids [B, S].
        targets_BS: int64, the id that follows each token; IGNORE where there is no loss. With samples of a user's file
            their field ``target``, [B, ...], of any dtype.
        valid_tokens: targets with a loss in the *whole* global batch, whichever rows these are.
        starts_BS: int64, the start of each token's document within its row; None where attention crosses documents.
        streams: further inputs of the loss for each target, by name: fp32 [B, S], where [b, s] belongs to
            ``targets_BS[b, s]``. ``weights`` are factors of a target's loss, of any sign.
        divisor: of the loss of the *whole* global batch, whichever rows these are; None means ``valid_tokens``.
        reads: the field that the first unit reads.
    """

    fields: Mapping[str, Tensor]
    targets_BS: Tensor  # noqa: N815 - the suffix names the dims
    valid_tokens: int
    starts_BS: Tensor | None = None  # noqa: N815
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    divisor: float | None = None
    reads: str = TOKENS

    @property
    def tokens_BS(self) -> Tensor:  # noqa: N802
        """The ids of token files."""
        return self.fields[TOKENS]

    @property
    def input(self) -> Tensor:
        """The input of the first unit, [B, ...]."""
        return self.fields[self.reads]

    def rows(self, chosen: slice) -> Batch:
        """Some rows of these."""
        return replace(
            self,
            fields={name: values[chosen] for name, values in self.fields.items()},
            targets_BS=self.targets_BS[chosen],
            starts_BS=None if self.starts_BS is None else self.starts_BS[chosen],
            streams={name: stream[chosen] for name, stream in self.streams.items()},
        )


class BatchSource(Protocol):
    """A source of global batches; reading changes nothing."""

    @property
    def batch_sequences(self) -> int: ...

    def batch(self, sample: int, rows: slice) -> Batch:
        """Rows of the global batch at cursor ``sample``."""
        ...

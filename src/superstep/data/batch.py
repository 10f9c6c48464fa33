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

from superstep.numerics.loss import IGNORE
from superstep.plan.model.axes import NEXT_TOKENS

SplitName = Literal["train", "validation"]

SPLITS: tuple[SplitName, ...] = ("train", "validation")

TOKENS = "tokens"
"""The field of token files."""

FURTHER_TARGETS = "further_targets"
"""The field with the target of multi-token prediction."""


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


def shift(values_BS: Tensor, last_B: Tensor | int) -> Tensor:
    """Each row's values from its second on, and a last one."""
    shifted = values_BS.roll(-1, dims=1)
    shifted[:, -1] = last_B
    return shifted


def add_further_tokens(batch: Batch) -> Batch:
    """The batch with the fields of multi-token prediction: ``next_tokens``, the token after each, and
    ``further_targets``, the one after that; IGNORE where there is none, or none in the same document.
    """
    targets_BS = batch.targets_BS
    last_B = targets_BS[:, -1].clamp(min=0)
    further_BS = shift(targets_BS, IGNORE)
    if batch.starts_BS is not None:
        further_BS = further_BS.masked_fill(shift(batch.starts_BS, -1) != batch.starts_BS, IGNORE)
    fields = {NEXT_TOKENS: shift(batch.tokens_BS, last_B), FURTHER_TARGETS: further_BS}
    return replace(batch, fields={**batch.fields, **fields})


class BatchSource(Protocol):
    """A source of global batches; reading changes nothing."""

    @property
    def batch_sequences(self) -> int: ...

    def batch(self, sample: int, rows: slice) -> Batch:
        """Rows of the global batch at cursor ``sample``."""
        ...

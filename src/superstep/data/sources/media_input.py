"""What a model reads beside text: how a picture or a sound becomes tokens, and fields of a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from superstep.plan.sample_fields import TARGET, Field, Placeholder, SampleFields

TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture or a sound of a conversation.

    Attributes:
        path: of its file.
        size: rows and columns of a picture's patches; frames of a sound.
    """

    path: str
    size: tuple[int, ...]


class MediaInput(Protocol):
    """What an encoder reads.

    Attributes:
        kind: the sort of a message's part, ``image`` or ``audio``.
        token: stands for ``rows`` rows of the first field.
        rows: of the encoder's fields for each token.
    """

    @property
    def kind(self) -> str: ...

    @property
    def token(self) -> int: ...

    @property
    def rows(self) -> int: ...

    def measure(self, path: Path) -> Medium:
        """Read a file; raises DataError where it cannot be read, or is no input of this encoder."""
        ...

    def list_fields(self, rows: int) -> tuple[Field, ...]:
        """The encoder's fields of a row of the batch with room for so many rows; the token stands for the first one."""
        ...

    def list_positions(self, tokens: int) -> tuple[Field, ...]:
        """Fields of a row beside its tokens, which have as many places."""
        ...

    def lay_out(self, tokens_S: Tensor, media: Sequence[Medium], folder: Path) -> dict[str, Tensor]:
        """The fields of a sample beside its tokens and targets; paths are relative to the folder."""
        ...


def count_rows(medium: Medium) -> int:
    """Rows of the encoder's fields: patches of a picture, frames of a sound."""
    return math.prod(medium.size)


def row_fields(reads: MediaInput, tokens: int, media_tokens: int) -> SampleFields:
    """The fields of a row of conversations.

    Args:
        reads: what the model reads.
        tokens: of a row.
        media_tokens: those of them that may stand for pictures or sounds.
    """
    encoder = reads.list_fields(media_tokens * reads.rows)
    text = (Field(TOKENS, (tokens,), "int64"), Field(TARGET, (tokens,), "int64"), *reads.list_positions(tokens))
    fields = (*text, *encoder)
    return SampleFields(
        fields=fields,
        reads=TOKENS,
        capacities={each.name: each.dims[0] for each in fields},
        placeholders={encoder[0].name: Placeholder(reads.token, reads.rows)},
    )


def sample_sizes(reads: MediaInput, tokens: int, media: Sequence[Medium]) -> Mapping[str, int]:
    """The first dim of each field of a sample."""
    rows = sum(map(count_rows, media))
    text = (TOKENS, TARGET, *(each.name for each in reads.list_positions(tokens)))
    return dict.fromkeys(text, tokens) | {each.name: rows for each in reads.list_fields(rows)}

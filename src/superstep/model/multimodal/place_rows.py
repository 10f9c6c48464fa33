"""Rows of encoders in the stream of a decoder, each in the place of its token.

    tokens    The  cat  P  P  P  sits  .  | What  is  P  P  ?
    rows                a  b  c                       d  e          the encoder's outputs, sample after sample

The k-th of these tokens in a row of the batch takes the k-th row of the encoder's output, so a row with several samples
needs no more than that both fields have the same order. Every rank computes the encoder for every microbatch: without
pictures, on padding. Where context-parallel ranks share the tokens, each of them has all rows, and the numbers of its
own tokens are given.

    B  rows of the batch    S  tokens    M  places of the encoder's output    D  width of the stream
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from superstep.model.axes import units as decoder_units
from superstep.model.decoder import Embedding
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.plan.model.shape import ModelShape

TOKENS = "tokens"
"""The field with the text, in which tokens stand for an encoder's rows."""


def place_rows(x_BSD: Tensor, rows_BMD: Tensor, is_place_BS: Tensor, numbers_BS: Tensor | None = None) -> Tensor:
    """The stream, in which each place has the encoder's row of its number within the row of the batch.

    Args:
        x_BSD: the stream.
        rows_BMD: of the encoder.
        is_place_BS: where they belong.
        numbers_BS: of each of these places among all of the row; None where S has all of them.
    """
    if numbers_BS is None:
        numbers_BS = is_place_BS.cumsum(1) - 1
    numbers_BS = numbers_BS.clamp(0, rows_BMD.shape[1] - 1)
    rows_BSD = rows_BMD.gather(1, numbers_BS.unsqueeze(-1).expand(-1, -1, rows_BMD.shape[2]))
    return torch.where(is_place_BS.unsqueeze(-1), rows_BSD.to(x_BSD.dtype), x_BSD)


class EmbeddingWithRows(Embedding):
    """Tokens to the stream, where some tokens stand for rows of encoders.

    Args:
        shape: the decoder's.
        tokens: the token of each encoder.
    """

    def __init__(self, shape: ModelShape, tokens: Sequence[int]) -> None:
        super().__init__(shape)
        self.tokens = tuple(tokens)

    def forward(self, tokens_BS: Tensor, *rows_BMD: Tensor, numbers: Tensor | None = None) -> Tensor:
        """The stream, [B, S, D]; ``rows_BMD`` are those of each encoder, ``numbers`` those of ``place_rows``."""
        return self.place(super().forward(tokens_BS), tokens_BS, rows_BMD, numbers)

    def place(
        self, x_BSD: Tensor, tokens_BS: Tensor, rows_BMD: Sequence[Tensor], numbers_BS: Tensor | None = None
    ) -> Tensor:
        """The stream with the rows of each encoder at the places of its token."""
        for token, rows in zip(self.tokens, rows_BMD, strict=True):
            x_BSD = place_rows(x_BSD, rows, tokens_BS == token, numbers_BS)
        return x_BSD


def join_decoder(
    encoders: Mapping[int, Sequence[UnitSpec]], shape: ModelShape, decoder: Sequence[UnitSpec] | None = None
) -> tuple[UnitSpec, ...]:
    """The units of encoders, and of a decoder that reads their rows at the places of their tokens.

    Args:
        encoders: by token, the units of each encoder: the last one returns rows of the decoder's width.
        shape: the decoder's.
        decoder: its units, from the embedding on; None for those of ``shape``.
    """
    embed, *others = decoder or decoder_units(shape)
    joined = replace(
        embed,
        build=partial(EmbeddingWithRows, shape, tuple(encoders)),
        inputs=(TOKENS, *(units[-1].name for units in encoders.values())),
        takes=("numbers",),
    )
    encode = (replace(unit, is_encoder=True) for units in encoders.values() for unit in units)
    return (*encode, *(replace(unit, decoder=shape) for unit in (joined, *others)))


def rename_parameters(unit: UnitSpec, old: str, new: str) -> UnitSpec:
    """The unit with another beginning of its parameters' names, where they begin with ``old``."""

    def rename(param: ParamSpec) -> ParamSpec:
        return replace(param, name=new + param.name.removeprefix(old) if param.name.startswith(old) else param.name)

    return replace(unit, params={local: rename(param) for local, param in unit.params.items()})

"""Rows of encoders at the places of their tokens, against plain code: token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from superstep.data.batch import TOKENS, Batch
from superstep.model.meta import on_meta
from superstep.model.multimodal.place_rows import EmbeddingWithRows
from superstep.model.unit import UnitSpec
from superstep.plan.sample_fields import SampleFields


def rows_fault(specs: Sequence[UnitSpec], fields: SampleFields, batch: Batch) -> str:
    """A difference between the rows that a model's unit puts at its tokens and plain code; empty without one.

    Args:
        specs: the model's units.
        fields: of a row of samples.
        batch: rows of samples; the encoders' rows are other numbers.
    """
    rooms = {each.token: fields.capacities[name] // each.rows for name, each in fields.placeholders.items()}
    for spec in specs if rooms else ():
        with on_meta():
            module = spec.build()
        if not isinstance(module, EmbeddingWithRows):
            continue
        tokens_BS = batch.fields[TOKENS]
        x_BS1 = -1.0 - torch.arange(tokens_BS.numel()).view(*tokens_BS.shape, 1)
        rows = [
            torch.arange(1.0, 1 + len(tokens_BS) * rooms[token]).view(-1, rooms[token], 1) for token in module.tokens
        ]
        placed = module.place(x_BS1, tokens_BS, rows).squeeze(-1)
        for token, given in zip(module.tokens, rows, strict=True):
            fault = _find_misplaced(tokens_BS, placed, given.squeeze(-1), token)
            if fault:
                return f"unit '{spec.name}': {fault}"
    return ""


def _find_misplaced(tokens_BS: Tensor, placed_BS: Tensor, rows_BM: Tensor, token: int) -> str:
    for row, (tokens, placed, given) in enumerate(
        zip(tokens_BS.tolist(), placed_BS.tolist(), rows_BM.tolist(), strict=True)
    ):
        number = 0
        for place, each in enumerate(tokens):
            if each != token:
                continue
            if placed[place] != given[number]:
                what = f"row {given.index(placed[place])}" if placed[place] in given else "no row"
                return f"token {place} of row {row} has {what} of its encoder, and its own is row {number}"
            number += 1
    return ""

"""Rows of an encoder that every context-parallel rank computes, for a decoder whose tokens the ranks share.

    encoder     rank 0: rows 0 1 2 3        rank 1: rows 0 1 2 3        the same on both
    decoder     rank 0: tokens of 0 1       rank 1: tokens of 2 3
    gradient    rank 0: rows 0 1 2 3        rank 1: zero

A row belongs to one token, so of the ranks one has a gradient of it and the others have zeros: their sum is exact. The
first rank takes it, so that the sum of the encoder's own gradients over the ranks counts it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from superstep.comm.mesh import Group
from superstep.engine.parallel.tensor import Enter
from superstep.model.unit import Source, UnitSpec, list_sources

EnterUnit = Callable[[Tensor], Tensor]


def find_entries(specs: Sequence[UnitSpec], unit: int, cp: Group | None) -> list[EnterUnit]:
    """A function for each input of a unit: what an encoder returns enters a decoder that ranks share. Empty where
    nothing does.
    """
    if cp is None or specs[unit].decoder is None:
        return []
    return [partial(_enter, cp) if _is_whole(specs, of) else _same for of in list_sources(specs)[unit]]


def _is_whole(specs: Sequence[UnitSpec], source: Source) -> bool:
    return isinstance(source, int) and specs[source - 1].is_encoder


def _same(x: Tensor) -> Tensor:
    return x


def _enter(group: Group, x: Tensor) -> Tensor:
    out: Tensor = _Enter.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class _Enter(Enter):
    """Forward is the identity; backward sums, for the first rank alone."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        total, _ = Enter.backward(ctx, grad)
        return total if ctx.group.rank() == 0 else torch.zeros_like(total), None

"""Position biases, which are added to a score by its key's distance: ALiBi, T5's buckets, relative positions.

    N  query heads       S  queries    R  buckets
    H  width of a head   T  keys       D  the distance from which on all biases are equal

Queries see no later keys, so distances count backwards, and 0 is a query's own place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slopes:
    """ALiBi (Press 2021): a score falls by its head's slope for each token between. Not learnt. ``slopes``:
    fp32 [N].
    """

    slopes: Tensor

    @property
    def tensor(self) -> Tensor:
        return self.slopes

    def of_heads(self, first: int, heads: int) -> Slopes:
        """Those of some heads."""
        return Slopes(self.slopes[first : first + heads])

    def of(self, distance_ST: Tensor) -> Tensor:
        """The biases of distances: [N, S, T]."""
        return -self.slopes[:, None, None] * distance_ST


@dataclass(frozen=True, slots=True)
class ByDistance:
    """A number for each distance, learnt or not; larger distances have the last number. ``table``: fp32 [N, D + 1]."""

    table: Tensor

    @property
    def tensor(self) -> Tensor:
        return self.table

    def of_heads(self, first: int, heads: int) -> ByDistance:
        """Those of some heads."""
        return ByDistance(self.table[first : first + heads])

    def of(self, distance_ST: Tensor) -> Tensor:
        """The biases of distances: [N, S, T]."""
        return self.table[:, distance_ST.clamp(max=self.table.shape[1] - 1)]


@dataclass(frozen=True, slots=True)
class ByContent:
    """A learnt vector for each distance, with which a query is multiplied as with a key (Shaw 2018, eq. 4); one for
    each head (Huang 2018). Larger distances have the last vector. ``table``: fp32 [N, H, D + 1].
    """

    table: Tensor

    @property
    def tensor(self) -> Tensor:
        return self.table

    def of_heads(self, first: int, heads: int) -> ByContent:
        """Those of some heads."""
        return ByContent(self.table[first : first + heads])


Bias = Slopes | ByDistance | ByContent


def bias_of(tensor: Tensor) -> Bias:
    """The bias with this ``tensor``: [N], [N, D + 1] or [N, H, D + 1]."""
    kinds: tuple[type[Slopes], type[ByDistance], type[ByContent]] = Slopes, ByDistance, ByContent
    return kinds[tensor.dim() - 1](tensor)


def alibi(heads: int, device: torch.device | None = None) -> Slopes:
    """The slopes of Press 2021: for 8 heads 1/2, 1/4, ... 1/256. For other numbers, those of the power of two below,
    and between them every other one of twice as many, as in the paper's code.
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / whole) for head in range(whole)]
    slopes += [2.0 ** (-4.0 * (head + 1) / whole) for head in range(0, 2 * (heads - whole), 2)]
    return Slopes(torch.tensor(slopes, dtype=torch.float32, device=device))


def t5(table_NR: Tensor, max_distance: int = 128) -> ByDistance:
    """T5's relative positions (Raffel 2020, sec. 2.1) of a decoder: half of the buckets for one distance each, the
    others wider and wider up to ``max_distance``. Gradients reach the table.
    """
    return ByDistance(table_NR[:, t5_buckets(table_NR.shape[1], max_distance).to(table_NR.device)])


def t5_buckets(buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance from 0 to ``max_distance``: int64 [D + 1]."""
    exact = buckets // 2
    distance = torch.arange(max_distance + 1)
    octaves = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (octaves * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, wide)

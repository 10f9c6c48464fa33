"""Position biases, which are added to a score by its key's distance: ALiBi, and T5's buckets.

    N  query heads    S  queries    R  buckets
                      T  keys       D  the distance from which on all biases are equal

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

    def of(self, distance_ST: Tensor) -> Tensor:
        """The biases of distances: [N, S, T]."""
        return -self.slopes[:, None, None] * distance_ST


@dataclass(frozen=True, slots=True)
class ByDistance:
    """A number for each distance, learnt or not; larger distances have the last number. ``table``: fp32 [N, D + 1]."""

    table: Tensor

    def of(self, distance_ST: Tensor) -> Tensor:
        """The biases of distances: [N, S, T]."""
        return self.table[:, distance_ST.clamp(max=self.table.shape[1] - 1)]


Bias = Slopes | ByDistance


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

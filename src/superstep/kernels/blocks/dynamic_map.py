"""Dynamic maps: 8-bit numbers with a scale for each block (Dettmers 2021, section 2.1), in plain torch.

A block of 256 numbers is multiplied by the inverse of its largest absolute value, its scale, and each quotient is
replaced by the nearest of 256 values. These have seven decades, each with twice the values of the decade below, evenly
spaced:

    decade      10^-7..10^-6   ..   10^-2..10^-1   10^-1..1
    signed           1         ..       32            64        of each sign, with 0 and 1
    unsigned         2         ..       64           128        with 0 and 1

Codes are ordered as their values. A block with a number that is not finite has the scale NaN, and all of it is NaN.
Every operation rounds once (IEEE 754), so that the C++ and Triton forms have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

SIZE = 256
"""Numbers of a block."""
DECADES = 7
LEAST_SCALE = 2.0**-120
"""A block of smaller numbers is zero: the inverse of its scale would be infinite."""


@dataclass(frozen=True, slots=True)
class DynamicMap:
    """A map of codes, by level: 0 is zero, 1 to 7 are the decades, 8 is one. A value's rank n counts values from zero.

    Attributes:
        is_signed: whether it has negative values: code 127 is zero then, else code 0.
        offset, step: of each level, fp32 [9]: the value of rank n is offset + n · step.
        inverse, shift: of each level, fp32 [9]: the rank of a quotient y is y · inverse + shift, rounded.
        last: the last rank of each level, fp32 [9].
        borders: quotients from which the next level is nearer, fp32 [8].
        values: of each code, fp32 [256].
    """

    is_signed: bool
    offset: Tensor
    step: Tensor
    inverse: Tensor
    shift: Tensor
    last: Tensor
    borders: Tensor
    values: Tensor

    @property
    def zero(self) -> int:
        """The code of zero."""
        return 127 if self.is_signed else 0

    def to(self, device: torch.device) -> DynamicMap:
        """The map with its tables on a device."""
        return _on_device(self.is_signed, device)


@cache
def dynamic_map(*, is_signed: bool) -> DynamicMap:
    """The map for first moments, or the unsigned one for second moments."""
    first_ranks = [2**i if is_signed else 2 ** (i + 1) - 1 for i in range(DECADES)]
    counts = [2**i if is_signed else 2 ** (i + 1) for i in range(DECADES)]
    tops = [10.0 ** (i + 1 - DECADES) for i in range(DECADES)]
    steps = [0.9 * top / count for top, count in zip(tops, counts, strict=True)]
    # The middle of the j-th of a decade's equal parts, j = n - the decade's first rank.
    offsets = [0.1 * top + step * (0.5 - first) for top, step, first in zip(tops, steps, first_ranks, strict=True)]
    firsts = [0.1 * top + 0.5 * step for top, step in zip(tops, steps, strict=True)]
    lasts = [top - 0.5 * step for top, step in zip(tops, steps, strict=True)]
    borders = [(low + high) / 2 for low, high in zip([0.0, *lasts], [*firsts, 1.0], strict=True)]
    last_ranks = [first + count - 1 for first, count in zip(first_ranks, counts, strict=True)]
    one = last_ranks[-1] + 1
    offset, step = torch.tensor([0.0, *offsets, 1.0]), torch.tensor([0.0, *steps, 0.0])
    rank = torch.arange(256) - (127 if is_signed else 0)
    level = _level_of_rank(rank.abs(), is_signed=is_signed)
    values = (rank.abs() * step[level] + offset[level]) * rank.sign()
    return DynamicMap(
        is_signed=is_signed,
        offset=offset,
        step=step,
        inverse=torch.tensor([0.0, *(1 / step for step in steps), 0.0]),
        shift=torch.tensor([0.0, *(-low / step for low, step in zip(offsets, steps, strict=True)), float(one)]),
        last=torch.tensor([0.0, *last_ranks, one], dtype=torch.float32),
        borders=torch.tensor(borders),
        values=values,
    )


@cache
def _on_device(is_signed: bool, device: torch.device) -> DynamicMap:
    here = dynamic_map(is_signed=is_signed)
    tables = {name: getattr(here, name).to(device) for name in DynamicMap.__slots__ if name != "is_signed"}
    return DynamicMap(is_signed=is_signed, **tables)


def _level_of_rank(rank: Tensor, *, is_signed: bool) -> Tensor:
    """The level of each rank, by the exponent of a float."""
    return torch.frexp((2 * rank + 1 if is_signed else rank + 1).float()).exponent.long() - 1


def decode(codes: Tensor, scales: Tensor, of: DynamicMap) -> Tensor:
    """The numbers of blocks: fp32 [N].

    Args:
        codes: uint8 [N].
        scales: fp32 [N / 256].
        of: the map.
    """
    values = of.to(codes.device).values[codes.long()]
    return (values.view(-1, SIZE) * scales[:, None]).view(-1)


def encode(numbers: Tensor, codes: Tensor, scales: Tensor, of: DynamicMap) -> None:
    """Write the codes and scales of numbers, fp32 [N]; unsigned maps take no negative ones."""
    of = of.to(numbers.device)
    x = numbers.view(-1, SIZE)
    largest = x.abs().amax(1)
    is_finite = largest.isfinite()
    is_usual = is_finite & (largest >= LEAST_SCALE)
    y = torch.where(is_usual[:, None], x, 0.0) * torch.where(is_usual, largest, 1.0).reciprocal()[:, None]
    size = y.abs()
    level = torch.zeros_like(size, dtype=torch.int64)
    for border in of.borders:
        level += size >= border
    rank = torch.minimum((size * of.inverse[level] + of.shift[level]).round(), of.last[level])
    if of.is_signed:
        rank = torch.where(y < 0, -rank.clamp(max=127), rank) + 127
    codes.copy_(rank.view(-1).to(torch.uint8))
    scales.copy_(torch.where(is_usual, largest, torch.where(is_finite, 0.0, torch.nan)))

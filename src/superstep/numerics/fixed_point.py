"""Sums that do not depend on their order: numbers on a fixed grid, added as integers.

Floating-point addition rounds, so the sum of three numbers depends on which two come first. Integers do not round. A
number is put on a grid of 2^-bits by cutting off what lies below it, which depends on that number alone; any order of
additions, on any number of ranks, then gives the same 64 bits. Inside the range nothing else is lost: fp32 has 24 bits,
so what is at least 2^(24 - bits) in size is on the grid already.

    grid         bits   range    smallest number that keeps 20 bits
    PARAMETER    50     ±2^12    2^-30    gradients of parameters, over microbatches and ranks
    ACTIVATION   58     ±2^4     2^-38    gradients of keys and values, over queries; each is of one token's share
    LOSS         24     -        -        nats of a token, added in fp64: exact up to 2^29 nats
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 2**16
"""Elements put on the grid at once: they stay in the cache between the passes (1 ns an element, 5 in one go)."""


class OutOfRange(RuntimeError):
    """A number lies outside the range of its grid, or is no number."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Multiples of 2^-bits below ``limit`` in size. 2^50 terms of the limit's size would overflow the sum of none."""

    bits: int

    @property
    def limit(self) -> float:
        """What a single term must stay below; a sum has room for two such."""
        return 2.0 ** (62 - self.bits)

    def add(self, into: Tensor, values: Tensor) -> None:
        """``into += values``, with an int64 ``into`` of the same shape; the values' memory is used up.

        Raises:
            OutOfRange: a value is too large or is no number.
        """
        if into.is_contiguous() and values.is_contiguous() and values.numel() > BLOCK:
            parts = zip(into.view(-1).split(BLOCK), values.view(-1).split(BLOCK), strict=True)
        else:
            parts = zip((into,), (values,), strict=True)
        for total, part in parts:
            total.add_(self.put_(part))

    def put_(self, values: Tensor) -> Tensor:
        """The values on the grid: int64. Their memory is used up, where they are fp32.

        Raises:
            OutOfRange: a value is too large or is no number.
        """
        wide = values.float()
        # No number is larger than the norm of all, which is ten times quicker to find than the largest.
        if not float(torch.linalg.vector_norm(wide)) < self.limit and not bool((wide.abs() < self.limit).all()):
            raise OutOfRange(
                f"a gradient lies outside ±{self.limit:g}, the range of exact sums, or is no number: training "
                "diverges. Lower train.lr, or raise train.warmup_steps."
            )
        return wide.mul_(2.0**self.bits).to(torch.int64)

    def take(self, total: Tensor) -> Tensor:
        """A sum as fp32, rounded once."""
        return (total.double() * 2.0**-self.bits).float()


PARAMETER = Grid(50)
ACTIVATION = Grid(58)
LOSS = Grid(24)


def exact_loss_sum(nats: Tensor) -> Tensor:
    """The sum of the losses of single tokens: fp64, the same in any order up to 2^29 nats."""
    return (nats.double() * 2.0**LOSS.bits).round_().sum() * 2.0**-LOSS.bits


def square_sum(values: Tensor) -> Tensor:
    """The squares' sum as two int64 numbers [2], in units of 2^-30 and of 2^-60: the same however values are cut up.

    Squares of fp32 numbers are exact in fp64. The coarse part counts whole units, the fine part what they leave; sums
    up to 2^33, and of 2^33 values, fit.
    """
    coarse = torch.zeros((), dtype=torch.int64, device=values.device)
    fine = coarse.clone()
    for part in values.reshape(-1).split(BLOCK):
        square = part.double().square_().mul_(2.0**30)
        whole = square.trunc()
        coarse += whole.to(torch.int64).sum()
        fine += square.sub_(whole).mul_(2.0**30).to(torch.int64).sum()
    return torch.stack((coarse, fine))


def from_square_sum(parts: Tensor) -> float:
    """The number that two sums of ``square_sum``, themselves added over ranks, mean."""
    coarse, fine = parts.tolist()
    return float(coarse * 2**30 + fine) * 2.0**-60

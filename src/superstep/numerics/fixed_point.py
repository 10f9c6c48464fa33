"""Sums that do not depend on their order: numbers on a fixed grid, added as integers.

Floating-point addition rounds, so the sum of three numbers depends on the order. Integers do not round. A number is put
on a grid of 2^-bits by cutting off lower bits, which depends on that number alone; any order of additions, on any
number of ranks, then gives the same 64 bits. Within the range nothing else is lost: fp32 has 24 bits, so a number of at
least 2^(24 - bits) is already on the grid.

    grid         bits   sum's range    smallest number that keeps 20 bits
    PARAMETER    50     ±2^13          2^-30    gradients of parameters, over microbatches and ranks
    ACTIVATION   58     ±2^5           2^-38    gradients of keys and values, over queries; each is of a token's share
    LOSS         24     -              -        nats of a token, added in fp64: exact up to 2^29 nats

A sum outside its range would wrap around. So each term must stay below the range divided by the most terms of a sum,
which follows from the run's batch and not from the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from superstep.kernels import fixed_point_sum as kernel
from superstep.numerics.sending import send

BLOCK = 2**16
"""Elements put on the grid at once: they stay in the cache between passes (1 ns an element, 5 ns all at once)."""


MEND = ": training diverges. Lower train.lr, raise train.warmup_steps, or set numerics.exact = false."

LARGEST_LOSS = 2.0**29
"""The largest sum of nats without rounding."""

LARGEST_SQUARE = 2.0**32
"""The limit of a sum of squares: half of the range."""


class OutOfRange(RuntimeError):
    """A number is outside the range of its grid, or is not a number."""


class RangeExcess:
    """A step's numbers out of range: noted when they appear, and read when the ranks meet, so that all stop together.
    Only the first is kept.
    """

    def __init__(self) -> None:
        self.excess_text = ""
        self._largest: dict[Grid, Tensor] = {}

    def note(self, what: str) -> None:
        self.excess_text = self.excess_text or what

    def watch(self, grid: Grid, largest: Tensor) -> None:
        """Check later whether a sum's largest term is in range: it is on a GPU, and this call does not wait."""
        before = self._largest.get(grid)
        self._largest[grid] = largest if before is None else torch.maximum(before, largest)  # of no number none

    def is_exceeded(self, device: torch.device) -> Tensor:
        """Whether something is noted, or a watched term is out of range: on the device."""
        are_beyond = [~(largest < grid.limit) for grid, largest in self._largest.items()]
        return torch.stack([send(torch.tensor(bool(self.excess_text)), device), *are_beyond]).any()

    def message(self) -> str:
        """The noted problem in words; waits for watched terms."""
        for grid, largest in self._largest.items():
            if not float(largest) < grid.limit:
                self.note(grid.message_of(float(largest)))
        return self.excess_text

    def clear(self) -> None:
        """Reset."""
        self.excess_text = ""
        self._largest.clear()


@dataclass(frozen=True, slots=True)
class Grid:
    """Multiples of 2^-bits, of which at most ``terms`` meet in a sum.

    Attributes:
        terms: a power of two.
        name: of the sum, for messages.
        excess: where a term out of range is noted; None raises at once.
    """

    bits: int
    terms: int = 2
    name: str = "a gradient"
    excess: RangeExcess | None = field(default=None, compare=False)

    @property
    def scale(self) -> float:
        """Grid steps in 1."""
        return 2.0**self.bits

    @property
    def limit(self) -> float:
        """The bound of a single term, so that ``terms`` of them stay within 64 bits."""
        return 2.0 ** (63 - self.bits) / self.terms

    def of(self, terms: int, name: str, excess: RangeExcess | None) -> Grid:
        """The same grid for a sum of at most ``terms``."""
        return replace(self, terms=1 << max(terms - 1, 1).bit_length(), name=name, excess=excess)

    def add(self, into: Tensor, values: Tensor) -> None:
        """``into += values``, with an int64 ``into`` of the same shape; may overwrite the values. Raises OutOfRange
        where a value is too large or not a number.
        """
        if kernel.takes(into, values):
            if not kernel.add(into, values, scale=self.scale, limit=self.limit):
                self.refuse(float(values.abs().max()))
            return
        if into.is_contiguous() and values.is_contiguous() and values.numel() > BLOCK:
            parts = zip(into.view(-1).split(BLOCK), values.view(-1).split(BLOCK), strict=True)
        else:
            parts = zip((into,), (values,), strict=True)
        for total, part in parts:
            total.add_(self.put_(part))

    def add_products(self, into_OI: Tensor, grad_BSO: Tensor, x_BSI: Tensor, chunks: int) -> bool:
        """``into += gradᵀ · x``, one product for each chunk of the tokens, by the kernel. Without a kernel it does
        nothing and returns False. Raises OutOfRange where an element of a product is too large or not a number.
        """
        if not kernel.takes_products(into_OI, grad_BSO, x_BSI):
            return False
        if not kernel.add_products(into_OI, grad_BSO, x_BSI, chunks=chunks, scale=self.scale, limit=self.limit):
            pairs = zip(grad_BSO.float().chunk(chunks, dim=1), x_BSI.float().chunk(chunks, dim=1), strict=True)
            self.refuse(float(torch.stack([torch.einsum("bso,bsi->oi", *pair).abs().max() for pair in pairs]).max()))
        return True

    def add_grouped_products(
        self, into_EOI: Tensor, grad_RO: Tensor, x_RI: Tensor, order_R: Tensor, starts: Tensor
    ) -> bool:
        """The same for many weights, each with its own chunks of rows; see the kernel. Raises OutOfRange where an
        element of a product is too large or not a number.
        """
        if not kernel.takes_products(into_EOI, grad_RO, x_RI):
            return False
        factors = grad_RO, x_RI, order_R
        if not kernel.add_grouped_products(into_EOI, *factors, starts, scale=self.scale, limit=self.limit):
            sizes = starts.diff().tolist()
            pairs = zip(*(each.float().index_select(0, order_R).split(sizes) for each in (grad_RO, x_RI)), strict=True)
            self.refuse(float(torch.stack([(grad.t() @ x).abs().max() for grad, x in pairs]).max()))
        return True

    def put_(self, values: Tensor) -> Tensor:
        """The values on the grid: int64. Overwrites them where they are fp32. Raises OutOfRange where a value is too
        large or not a number, and there is no ``excess`` to note it.
        """
        wide = values.float()
        if self.excess is not None and wide.is_cuda and wide.numel():
            self.excess.watch(self, torch.linalg.vector_norm(wide, torch.inf))
            return wide.mul_(self.scale).to(torch.int64)
        # No number is larger than the norm of all, which is ten times quicker to find than the largest.
        if not float(torch.linalg.vector_norm(wide)) < self.limit and not bool((wide.abs() < self.limit).all()):
            self.refuse(float(wide.abs().max()))
        return wide.mul_(self.scale).to(torch.int64)

    def refuse(self, largest: float) -> None:
        """Note, or raise, that a term is out of range."""
        if self.excess is None:
            raise OutOfRange(self.message_of(largest))
        self.excess.note(self.message_of(largest))

    def message_of(self, largest: float) -> str:
        room = f"room for {self.terms} terms below {self.limit:g} in size"
        return f"{self.name} has a term of {largest:.3g}, and its exact sum has {room}{MEND}"

    def take(self, total: Tensor) -> Tensor:
        """A sum as fp32, rounded once."""
        return (total.double() * 2.0**-self.bits).float()

    def take_into(self, out: Tensor, total: Tensor) -> None:
        """``take`` into existing contiguous fp32 memory, with only a block's extra memory."""
        for to, part in zip(out.split(BLOCK), total.split(BLOCK), strict=True):
            to.copy_(self.take(part))


PARAMETER = Grid(50)
ACTIVATION = Grid(58)
LOSS = Grid(24)


def exact_loss_sum(nats: Tensor) -> Tensor:
    """The sum of the losses of single tokens: fp64, the same in any order up to 2^29 nats."""
    return (nats.double() * 2.0**LOSS.bits).round_().sum() * 2.0**-LOSS.bits


def square_sum(values: Tensor) -> Tensor:
    """The sum of squares as three int64 numbers [3], to add over ranks: in units of 2^-30, of 2^-60, and roughly of 1.
    The first two give the same sum for any split of the values.

    Squares of fp32 numbers are exact in fp64. The coarse part counts whole units, the fine part the rest, and carries
    over full units; so they hold sums up to 2^33 of any number of values. The rough part detects larger sums.
    """
    coarse, fine, rough = (torch.zeros((), dtype=torch.int64, device=values.device) for _ in range(3))
    for part in values.reshape(-1).split(BLOCK):
        square = part.double().square_().mul_(2.0**30)
        rough += square.sum().mul_(2.0**-30).clamp_(max=2.0**40).to(torch.int64)
        whole = square.trunc()
        coarse += whole.to(torch.int64).sum()
        fine += square.sub_(whole).mul_(2.0**30).to(torch.int64).sum()
        coarse += fine >> 30
        fine &= 2**30 - 1
    return torch.stack((coarse, fine, rough))


def from_square_sum(parts: Sequence[int]) -> float:
    """The number of three parts of ``square_sum``, added over ranks. Raises OutOfRange where it is too large to be
    exact; the same on every layout.
    """
    coarse, fine, rough = parts
    units = coarse * 2**30 + fine
    # The rough sum is right to a unit a block. Where it is far above, the exact one may have wrapped around.
    if rough >= 1.5 * LARGEST_SQUARE or units >= LARGEST_SQUARE * 2**60:
        norm = max(float(rough), units * 2.0**-60) ** 0.5
        raise OutOfRange(
            f"the gradient norm is {norm:.3g}, and its exact sum has room below {LARGEST_SQUARE**0.5:g}{MEND}"
        )
    return float(units) * 2.0**-60


def require_exact_loss(nats: float) -> float:
    """Return a step's loss sum if it was summed without rounding; NaN is left to other checks. Raises OutOfRange where
    it was rounded.
    """
    if abs(nats) >= LARGEST_LOSS:
        raise OutOfRange(f"the losses of a step sum to {nats:.3g} nats, and exact sums have room below 2^29{MEND}")
    return nats

"""The model on the ranks that share it: rank 0 says what is computed, all compute it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from superstep.runtime.collectives import from_first
from superstep.runtime.device import Device
from superstep.runtime.exact.linear import Cut
from superstep.runtime.exact.loss import totals_
from superstep.runtime.mesh import Group
from superstep.serve.compute.draw import totals_of
from superstep.serve.compute.rows import Rows, from_numbers, to_numbers

Compute = Callable[[Rows], Tensor]
"""A rank's part of the model: rows in, logits of the wanted rows out, fp32 and the same on every rank: [R, V]."""

END: list[int] = []
"""Told to the other ranks when there is nothing more to compute."""

NOTHING = Rows(tokens=(), parts=(), wanted=())
"""Told to them when there is nothing yet: who waits for too long takes rank 0 for lost."""


class Ranks:
    """What the engine calls, on rank 0.

    Args:
        forward: this rank's part of the model.
        cells: the pieces of a sum over the vocabulary in exact mode; None in fast mode.
        group: the ranks that share the model; None where there is one.
        device: where they compute.
    """

    def __init__(self, forward: Compute, *, cells: int | None, group: Group | None, device: Device) -> None:
        self._forward = forward
        self._cells = cells
        self._group = group
        self._device = device

    def __call__(self, rows: Rows) -> Tensor:
        """The logits of the wanted rows, fp32: [R, V]."""
        if self._group is not None:
            from_first(to_numbers(rows), self._group, self._device.torch)
        return self._forward(rows)

    def totals(self, logits_RV: Tensor) -> list[tuple[float, float]]:
        """For each row the largest logit, and the logarithm of the sum of exp(logit - largest), as in training."""
        if self._cells is None:
            return totals_of(logits_RV)
        cut = Cut(cells_in=1, cells_out=self._cells, is_cut_in=False, is_cut_out=False, chunks=1, group=None)
        _, total_R1, top_R1 = totals_(logits_RV.clone(), cut)
        return list(zip(top_R1.flatten().tolist(), total_R1.log().flatten().tolist(), strict=True))

    def wait(self) -> None:
        """Keep the other ranks waiting."""
        if self._group is not None:
            from_first(to_numbers(NOTHING), self._group, self._device.torch)

    def end(self) -> None:
        """Let the other ranks go."""
        if self._group is not None:
            from_first(END, self._group, self._device.torch)


def follow(forward: Compute, group: Group, device: Device) -> None:
    """What the other ranks do: compute what rank 0 says, until it says the end."""
    while numbers := from_first(END, group, device.torch):
        rows = from_numbers(numbers)
        if rows.tokens:
            forward(rows)

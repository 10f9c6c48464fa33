"""Low-rank products: what adapters add to one linear's output.

    exact    for each adapter   A, the sum over tp, rounded; B, the scale, added in fp32
    fast     one adapter        the same in the dtype of the weights
             several            one product by the A of all, other adapters' columns masked, one product by the B of all

In the third, a step of many requests takes as many calls as a step of one. It computes columns that it then masks, so
the sum of the ranks must be small.

    T  rows      I  inputs held here      O  outputs held here      R  rank      S  sum of the ranks of several adapters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.comm.collectives import stack_ranks
from superstep.comm.mesh import Group
from superstep.numerics.invariant_matmul import product, tree_sum
from superstep.numerics.sending import send
from superstep.serve.compute.flat_batch import RequestRows

MOST_JOINED = 256
"""The largest sum of ranks that is computed for all rows: small against the width of a model."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Consecutive rows of one adapter.

    Attributes:
        slot: the adapter's number.
        rows: the slice of the step's rows.
    """

    slot: int
    rows: slice


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """The rows of a step that have adapters.

    Attributes:
        runs: of each adapter.
        rows: the slice from the first to the last such row.
        slots: the adapter of each of these rows, [T, 1]; 0 is none.
    """

    runs: tuple[AdapterRows, ...]
    rows: slice
    slots: Tensor


def runs_of(parts: Sequence[RequestRows]) -> tuple[AdapterRows, ...]:
    """Rows with adapters; neighbours with the same adapter are joined."""
    runs: list[AdapterRows] = []
    at = 0
    for part in parts:
        end = at + part.count
        if part.adapter:
            if runs and runs[-1].slot == part.adapter and runs[-1].rows.stop == at:
                runs[-1] = AdapterRows(part.adapter, slice(runs[-1].rows.start, end))
            else:
                runs.append(AdapterRows(part.adapter, slice(at, end)))
        at = end
    return tuple(runs)


def now_of(parts: Sequence[RequestRows], device: torch.device) -> AdapterBatch | None:
    """The adapter rows of a step; None where no row has an adapter."""
    runs = runs_of(parts)
    if not runs:
        return None
    rows = slice(runs[0].rows.start, runs[-1].rows.stop)
    slot_T1 = torch.zeros(rows.stop - rows.start, 1, dtype=torch.int64)
    for run in runs:
        slot_T1[run.rows.start - rows.start : run.rows.stop - rows.start] = run.slot
    return AdapterBatch(runs, rows, send(slot_T1, device))


@dataclass(frozen=True, slots=True)
class Factors:
    """This rank's part of an adapter's factors of a linear: [R, I] and [O, R]."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class _Joined:
    """Joined factors of several adapters, [S, I] and [O, S] with the scales, and the adapter of each column, [S]."""

    slots: tuple[int, ...]
    a: Tensor
    b: Tensor
    owners: Tensor


class Additions:
    """Additions of a rank's adapters to one linear.

    Args:
        cells: of exact mode's sum over the inputs held here; None in fast mode.
        group: ranks that hold the other inputs; None where all are here.
    """

    def __init__(self, cells: int | None, group: Group | None) -> None:
        self.factors: dict[int, Factors] = {}
        self._cells = cells
        self._group = group
        self._joined: _Joined | None = None

    def drop(self, slot: int) -> None:
        self.factors.pop(slot, None)
        self._joined = None

    def add(self, out_TO: Tensor, x_TI: Tensor, now: AdapterBatch) -> None:
        """Add, in place, to the output of the linear."""
        held = [run for run in now.runs if run.slot in self.factors]
        slots = tuple(sorted({run.slot for run in held}))
        if self._cells is None and len(slots) > 1 and self._ranks(slots) <= MOST_JOINED:
            self._add_joined(out_TO[now.rows], x_TI[now.rows], now.slots, self._join(slots))
        elif held:
            self._add_each(out_TO, x_TI, held)

    def _add_each(self, out_TO: Tensor, x_TI: Tensor, runs: Sequence[AdapterRows]) -> None:
        inner = [self._inner(x_TI[run.rows], self.factors[run.slot].a) for run in runs]
        for run, h_TR in zip(runs, self._over_ranks(inner), strict=True):
            factors, into = self.factors[run.slot], out_TO[run.rows]
            if self._cells is None:
                into.addmm_(h_TR, factors.b.t(), alpha=factors.scale)
            else:
                added = product(h_TR.to(factors.b.dtype), factors.b.t()).mul_(factors.scale)
                into.copy_(added.add_(into))

    def _add_joined(self, out_TO: Tensor, x_TI: Tensor, slot_T1: Tensor, joined: _Joined) -> None:
        (h_TS,) = self._over_ranks([x_TI @ joined.a.t()])
        # Not a product with 0: NaN in one row would then spread to others.
        h_TS = h_TS.masked_fill(slot_T1 != joined.owners, 0.0)
        out_TO.addmm_(h_TS, joined.b.t())

    def _inner(self, x_TI: Tensor, a_RI: Tensor) -> Tensor:
        """A(x), or the partial sum over the inputs held here: fp32 in exact mode."""
        return x_TI @ a_RI.t() if self._cells is None else product(x_TI, a_RI.t(), cells=self._cells)

    def _over_ranks(self, inner: Sequence[Tensor]) -> Sequence[Tensor]:
        """The sums over the ranks that hold the other inputs; one exchange for all adapters."""
        if self._group is None:
            return inner
        stacked = stack_ranks(torch.cat([h_TR.flatten() for h_TR in inner]), self._group)
        total = stacked.sum(0) if self._cells is None else tree_sum(stacked.unbind())
        parts = total.split([h_TR.numel() for h_TR in inner])
        return [part.view_as(h_TR) for part, h_TR in zip(parts, inner, strict=True)]

    def _ranks(self, slots: Sequence[int]) -> int:
        return sum(len(self.factors[slot].a) for slot in slots)

    def _join(self, slots: tuple[int, ...]) -> _Joined:
        """Keep the joined factors until a step has other adapters: they stay the same for many tokens."""
        if self._joined is None or self._joined.slots != slots:
            held = [self.factors[slot] for slot in slots]
            self._joined = _Joined(
                slots,
                torch.cat([one.a for one in held]),
                torch.cat([(one.b.float() * one.scale).to(one.b.dtype) for one in held], 1),
                torch.cat([torch.full((len(one.a),), slot) for slot, one in zip(slots, held, strict=True)]).to(
                    held[0].a.device
                ),
            )
        return self._joined

"""Bit sums of one rank's state, taken as updates write it: nothing else may change it.

    update of unit u          before_update: has it changed since?    after_update: take its new sums

Sums are taken unit by unit: at most one unit's update lies between a write and its sum, or a comparison and the read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from superstep.engine.flat.buffers import UnitBuffers
from superstep.numerics.sending import send
from superstep.state.fingerprint import bit_sums
from superstep.state.tensor_piece import TensorPiece


class StateSums:
    """Sums of one rank; an observer of its optimizer.

    Args:
        pieces: of the trained state: views of the buffers.
        buffers: of every unit that the optimizer updates.
    """

    def __init__(self, pieces: Sequence[TensorPiece], buffers: Iterable[UnitBuffers]) -> None:
        self._pieces = pieces
        self._of: dict[int, list[int]] = {}
        self._at: dict[int, Tensor] = {}
        for b in buffers:
            own = {tensor.untyped_storage().data_ptr() for tensor in b.state}
            self._of[id(b)] = at = [n for n, p in enumerate(pieces) if p.values.untyped_storage().data_ptr() in own]
            self._at[id(b)] = send(torch.tensor(at, dtype=torch.int64), b.master.device)
        self._sums: Tensor | None = None
        self._has_changed: Tensor | None = None
        self.is_wanted = False
        """Whether the sums of what the next update writes are."""

    @property
    def are_known(self) -> bool:
        return self._sums is not None

    def take(self, sums: Tensor | None = None) -> None:
        """Accept the current state; ``sums`` are its sums, if known."""
        self._sums = bit_sums(self._pieces) if sums is None else sums.clone()
        self._has_changed = None

    def forget(self) -> None:
        """Drop the sums: the state is written outside of an update."""
        self._sums = self._has_changed = None

    def find_changed(self, sums: Tensor) -> Tensor:
        """Pieces that something else changed, bool [pieces]; all False without sums.

        Args:
            sums: of the current pieces.
        """
        changed = torch.zeros_like(sums, dtype=torch.bool) if self._has_changed is None else self._has_changed
        return changed if self._sums is None else changed | (sums != self._sums)

    def before_update(self, buffers: UnitBuffers) -> None:
        """Compare a unit before an update reads it."""
        numbers, at = self._of[id(buffers)], self._at[id(buffers)]
        if self._sums is not None and numbers:
            changed = torch.zeros_like(self._sums, dtype=torch.bool)
            changed[at] = self._now(numbers) != self._sums[at]
            self._has_changed = changed if self._has_changed is None else self._has_changed | changed

    def after_update(self, buffers: UnitBuffers) -> None:
        """Take a unit's sums after its update."""
        numbers = self._of[id(buffers)]
        if not self.is_wanted:
            self._sums = None
        elif numbers:
            if self._sums is None:
                self._sums = bit_sums(self._pieces)
            self._sums[self._at[id(buffers)]] = self._now(numbers)

    def _now(self, numbers: Sequence[int]) -> Tensor:
        return bit_sums([self._pieces[n] for n in numbers])

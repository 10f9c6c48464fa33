"""The model on the ranks that share it: rank 0 sends each step, and all ranks compute it.

[]                          the end
[changes, rows ...]         a step; ``changes`` is the number of the weights' updates
[ORDER, bytes ...]          a command between two steps
[ADAPTER_ORDER, bytes ...]  a command about adapters
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from superstep.comm.collectives import from_first
from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.engine.exact.linear import ReductionCut
from superstep.engine.exact.loss import totals_
from superstep.errors import ConfigError
from superstep.serve.compute.flat_batch import Rows, from_numbers, to_numbers
from superstep.serve.compute.lora import Adapters
from superstep.serve.compute.runner import lora_broadcast
from superstep.serve.compute.runner.rank_commands import (
    ORDERS,
    AreWeightsRead,
    CommandChannel,
    ForgetWeights,
    Order,
    ReadWeights,
    SleepRanks,
    SwitchWeights,
    Tensors,
    WakeRanks,
)
from superstep.serve.compute.sampler import columns
from superstep.serve.files.reader import TIMEOUT_S

END: list[int] = []
"""Sent to the other ranks when there are no more steps."""

ORDER = -1
"""Marks a command."""

NOTHING = Rows(tokens=(), parts=(), wanted=())
"""Sent while idle: a rank that waits too long takes rank 0 for lost."""


class Compute(Protocol):
    """A rank's part of the model."""

    leaves_rows: bool
    """Whether only wanted rows are computed after the last layer's keys."""

    @property
    def adapters(self) -> Adapters: ...
    def __call__(self, rows: Rows) -> Tensor:
        """The logits of the wanted rows, fp32 and the same on every rank: [R, V]."""

    def totals(self, logits_RV: Tensor) -> Tensor:
        """``LogitTotals`` of each of these rows, in fast mode: [R, 3]."""


class ModelRunner:
    """The model that the engine calls, on rank 0.

    Args:
        forward: this rank's part of the model.
        cells: the pieces of a sum over the vocabulary in exact mode; None in fast mode.
        group: the ranks that share the model; None for one rank.
        device: of the computation.
        party: this rank's channel for commands between steps; None where there are none.
        small: this rank's part of the draft model; None without one.
        read_timeout_s: for reading an adapter.
    """

    def __init__(
        self,
        forward: Compute,
        *,
        cells: int | None,
        group: Group | None,
        device: Device,
        party: CommandChannel | None = None,
        small: Compute | None = None,
        read_timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._forward = forward
        self._read_timeout_s = read_timeout_s
        self._small = small
        self._cells = cells
        self._group = group
        self._device = device
        self._party = party
        self._changes = 0

    @property
    def party(self) -> CommandChannel:
        """This rank's channel for commands between steps."""
        assert self._party is not None, "the model was opened to be changed"
        return self._party

    def __call__(self, rows: Rows) -> Tensor:
        """The logits of the wanted rows, fp32: [R, V]."""
        self._begin(rows)
        return self._forward(rows)

    def guess_logits(self, rows: Rows) -> Tensor:
        """The draft model's logits of the wanted rows."""
        assert self._small is not None, "nobody guesses without a small model"
        self._begin(replace(rows, is_draft=True))
        return self._small(rows)

    def totals(self, logits_RV: Tensor) -> Tensor:
        """``LogitTotals`` of each row, on the logits' device; in exact mode with the bits of training: [R, 3]."""
        if self._cells is None:
            return self._forward.totals(logits_RV)
        cut = ReductionCut(cells_in=1, cells_out=self._cells, is_cut_in=False, is_cut_out=False, chunks=1, group=None)
        _, total_R1, top_R1 = totals_(logits_RV.clone(), cut)
        return columns(top_R1.flatten(), total_R1.log().flatten(), logits_RV.argmax(-1))

    def read_adapter(self, folder: Path) -> None:
        """Start to read an adapter on all ranks in the background.

        Raises:
            ConfigError: the model supports no adapters.
        """
        lora_broadcast.read(self._forward.adapters, folder, self._group, self._device, self._read_timeout_s)

    def is_adapter_read(self, most_s: float) -> bool:
        """Whether all ranks have read it; waits ``most_s`` for rank 0's own reader."""
        return lora_broadcast.is_read(self._forward.adapters, self._group, self._device, most_s)

    def hold_adapter(self, number: int) -> str:
        """Add the adapter that was read under a number, on every rank or none; its version.

        Raises:
            UserError: it cannot be used.
        """
        return lora_broadcast.hold(self._forward.adapters, number, self._group, self._device)

    def drop_adapter(self, number: int) -> None:
        lora_broadcast.drop(self._forward.adapters, number, self._group, self._device)

    def wait(self) -> None:
        """Keep the other ranks from timing out while idle."""
        self._tell([self._changes, *to_numbers(NOTHING)])

    def end(self) -> None:
        """Stop the other ranks."""
        self._tell(END)

    def read(self, source: Path | Tensors | None, *, is_named: bool = True) -> None:
        """Start to read weights on all ranks in the background. Tensors need a model on one rank.

        Args:
            source: of the weights; None means those that were in place.
            is_named: whether to compute the weights' version.
        """
        if source is None or isinstance(source, Path):
            self._order(ReadWeights(None if source is None else str(source)))
        else:
            self._require_alone()
        self.party.read(source, is_named=is_named)

    def is_read(self) -> bool:
        """Whether all ranks have finished reading; rank 0's own reader is checked first."""
        reading = self.party.reading
        assert reading is not None, "something is read"
        if not reading.is_over:
            return False
        self._order(AreWeightsRead())
        return self.party.is_read()

    def switch(self) -> None:
        """Install the weights that were read, on all ranks.

        Raises:
            StateError: a rank could not read them; no rank is changed.
        """
        self._order(SwitchWeights())
        self.party.switch()
        self._changes += 1

    def forget(self) -> None:
        """Drop the weights that were read."""
        self._order(ForgetWeights())
        self.party.forget()

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free memory on all ranks."""
        self._order(SleepRanks(keeps_weights))
        self.party.memory.sleep(keeps_weights=keeps_weights)

    def wake(self) -> str:
        """Allocate memory again, with the weights that were read; returns their version, or "" without one.

        Raises:
            StateError: the weights cannot be served; all ranks stay asleep.
        """
        self._order(WakeRanks())
        woken = self.party.wake()
        self._changes = self.party.memory.changes
        return woken

    def _begin(self, rows: Rows) -> None:
        self._tell([self._changes, *to_numbers(rows)])
        if self._party is not None:
            self._party.check(self._changes)

    def _order(self, order: Order) -> None:
        self._tell([ORDER, *ORDERS.to_numbers(order)])

    def _tell(self, numbers: list[int]) -> None:
        if self._group is not None:
            from_first(numbers, self._group, self._device.torch)

    def _require_alone(self) -> None:
        if self._group is not None:
            raise ConfigError(
                f"weights are given as tensors, and {self._group.size()} ranks share the model; publish a snapshot "
                "(superstep.serve.files.weights.publish) and give its path."
            )


def follow(
    forward: Compute, group: Group, device: Device, party: CommandChannel | None = None, small: Compute | None = None
) -> None:
    """The loop of the other ranks: compute what rank 0 sends, until ``END``."""
    while numbers := from_first(END, group, device.torch):
        first, *rest = numbers
        if first == ORDER:
            assert party is not None, "the model was opened to be changed"
            party.obey(ORDERS.from_numbers(rest))
            continue
        if first == lora_broadcast.ADAPTER_ORDER:
            lora_broadcast.obey(rest, forward.adapters, group, device)
            continue
        rows = from_numbers(rest)
        if rows.tokens:
            if party is not None:
                party.check(first)
            model = small if rows.is_draft else forward
            assert model is not None, "all ranks have a small model, or none"
            model(rows)

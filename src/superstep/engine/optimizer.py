"""The optimizer on flat shards: clips by the global norm, and updates by a rule of ``numerics.update_rules``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from superstep.comm.collectives import sum_over
from superstep.comm.mesh import Group
from superstep.comm.objects import gather
from superstep.engine.flat.buffers import UnitBuffers
from superstep.engine.flat.narrow_moments import list_narrow_parts
from superstep.kernels.rows.table_rows import square_rows, update_rows
from superstep.model.unit import step_of_statistic
from superstep.numerics.fixed_point import (
    BLOCK,
    OutOfRange,
    RangeExcess,
    from_square_sum,
    require_exact_loss,
    square_sum,
)
from superstep.numerics.narrow.narrow_update import update_narrow
from superstep.numerics.sending import send
from superstep.numerics.update_rules import OptimizerSettings, UpdateNumbers, UpdateRule

_ROW = 512
"""Elements summed in fp32: with 4096 equal ones the error is up to 3.6e-6; with this, 4e-7 at the same cost."""


@dataclass(frozen=True, slots=True)
class OwnedRanges:
    """A unit's buffers, and the ranges of its shard that this rank counts in sums over all ranks."""

    buffers: UnitBuffers
    ranges: tuple[tuple[int, int], ...]


class UpdateObserver(Protocol):
    """Called right before an update reads a unit's state, and right after the update has written it."""

    def before_update(self, buffers: UnitBuffers) -> None: ...
    def after_update(self, buffers: UnitBuffers) -> None: ...


Parts = tuple[list[Tensor], list[Tensor], list[list[Tensor]]]
"""Parameters, their gradients, and a list for each moment."""


class Optimizer:
    """Updates a rank's shards, fp32 throughout; weight decay is for matrices alone. A running statistic is
    updated by adding its gradient, which does not count in the gradient norm.

    Args:
        units: of this rank.
        rule: the update.
        hyper: the settings.
        world: the group of all ranks; None for one rank.
        is_exact: bits are independent of the parameters' cut: no fused kernel, as its vectors and remainder differ, and
            a norm that is summed as integers.
        seed: of the run, for numbers that are rounded stochastically.

    Attributes:
        hyper: the settings of the next update.
        steps: of the training so far.
        skipped: those of them without an update.
        watcher: if set, units are updated in sequence, and it is called for each.
    """

    def __init__(
        self,
        units: Sequence[OwnedRanges],
        rule: UpdateRule,
        hyper: OptimizerSettings,
        world: Group | None = None,
        *,
        is_exact: bool = False,
        seed: int = 0,
    ) -> None:
        self._units = units
        self._rule = rule
        self.hyper = hyper
        self._world = world
        self._is_exact = is_exact
        self.steps = self.skipped = 0
        self.watcher: UpdateObserver | None = None
        self._of_unit = [_parts([unit]) for unit in units]
        self._of_all = _parts(units)
        self._narrow = {id(b): list_narrow_parts(b, seed) for b in (unit.buffers for unit in _list_learnt(units))}

    def sums(
        self, numbers: Tensor, excess: RangeExcess, flags: Sequence[bool] = ()
    ) -> tuple[float, list[float], list[bool]]:
        """The squared gradient norm and the numbers ``numbers``, each summed over all ranks, and the flags that any
        rank has set: in one collective, which a step needs anyway, so that all ranks know the flags after the same
        step.

        Args:
            numbers: fp64, the step's loss first.
            excess: range overflows of exact sums on this rank.
            flags: of this rank; as many on each.

        Raises:
            OutOfRange: on every rank, if one has an ``excess``, or a sum itself overflows.
        """
        for unit in self._units:
            unit.buffers.finish_gradient()
        parts = [unit.buffers.reduced[low:high] for unit in _list_learnt(self._units) for low, high in unit.ranges]
        sparse = [unit.buffers for unit in _list_sparse(self._units) if unit.ranges]
        if self._is_exact:
            squares = torch.zeros(4 + len(flags), dtype=torch.int64, device=numbers.device)
            squares[3] = excess.is_exceeded(numbers.device)
            squares[4:] = send(torch.tensor(flags, dtype=torch.int64), numbers.device)
            for part in (*parts, *map(_take_touched, sparse)):
                squares[:3] += square_sum(part)
            summed: list[int] = sum_over(squares, self._world).tolist()
            if summed[3]:
                raise OutOfRange(next(message for message in gather(excess.message(), str) if message))
            excess.clear()
            everything: list[float] = sum_over(numbers, self._world).tolist()
            require_exact_loss(everything[0])
            return from_square_sum(summed[:3]), everything, [bool(flag) for flag in summed[4:]]
        square = _square_sum(parts, numbers.device)
        for buffers in sparse:
            square += _row_square(buffers)
        flag_numbers = send(torch.tensor(flags, dtype=torch.float64), numbers.device)
        mine = torch.cat((square.view(1), flag_numbers, numbers))
        total: list[float] = sum_over(mine, self._world).tolist()
        return total[0], total[1 + len(flags) :], [each > 0 for each in total[1 : 1 + len(flags)]]

    def skip(self) -> None:
        """Count a step without an update."""
        self.steps += 1
        self.skipped += 1

    def unscale(self, loss_scale: float) -> None:
        """Divide the gradients by the loss scale in place, for whoever reads them before the update."""
        for buffers in (unit.buffers for unit in self._units):
            if buffers.layout.family != "statistics":
                buffers.complete_gradient().mul_(1.0 / loss_scale)

    def step(self, lr: float, norm: float, loss_scale: float = 1.0) -> None:
        """Update the master weights.

        Args:
            lr: the learning rate.
            norm: the global gradient norm; above ``clip_norm`` the gradients are scaled down to it.
            loss_scale: a factor of the gradients, but not of ``norm``.
        """
        self.steps += 1
        scale = loss_scale * max(norm / self.hyper.clip_norm, 1.0)
        if self.watcher is None:
            self._update_all(self._of_all, lr, scale)
            self._update_narrow(self._units, lr, scale)
            self._update_rows(self._units, lr, scale)
            _add_statistics(self._units)
        else:
            for unit, updates in zip(self._units, self._of_unit, strict=True):
                self.watcher.before_update(unit.buffers)
                self._update_all(updates, lr, scale)
                self._update_narrow([unit], lr, scale)
                self._update_rows([unit], lr, scale)
                _add_statistics([unit])
                self.watcher.after_update(unit.buffers)
        for unit in self._units:
            if not unit.buffers.shards_optimizer:
                unit.buffers.refresh()

    def _update_all(self, halves: tuple[Parts, Parts], lr: float, scale: float) -> None:
        """Update the parameters with weight decay, and those without. ``scale`` divides their gradients."""
        for (params, grads, moments), decay in zip(halves, (self.hyper.weight_decay, 0.0), strict=True):
            now = self._numbers(lr, scale, decay)
            if self._rule.fused is None or self._is_exact:
                for tensors in zip(params, grads, *moments, strict=True):
                    # Temporaries of an update are as large as its block.
                    for param, grad, *rest in zip(*(tensor.split(BLOCK) for tensor in tensors), strict=True):
                        self._rule.update(param, grad, rest, self.hyper, now)
            elif params:
                self._rule.fused(params, grads, moments, self.hyper, now)

    def _update_narrow(self, units: Sequence[OwnedRanges], lr: float, scale: float) -> None:
        """Update the parameters with moments or master weights in fewer bits than fp32."""
        for unit in units:
            for part, is_decayed in self._narrow.get(id(unit.buffers), ()):
                now = self._numbers(lr, scale, self.hyper.weight_decay if is_decayed else 0.0)
                update_narrow(part, self._rule, self.hyper, now)

    def _numbers(self, lr: float, scale: float, decay: float) -> UpdateNumbers:
        return UpdateNumbers(lr=lr, decay=decay, scale=scale, number=self.steps - self.skipped)

    def _update_rows(self, units: Sequence[OwnedRanges], lr: float, scale: float) -> None:
        """Update touched rows of tables with sparse gradients: by SGD, as other rules move rows without a gradient."""
        for buffers in (unit.buffers for unit in _list_sparse(units)):
            assert buffers.touched is not None
            table, (rows, grads, is_packed) = buffers.touched.rows_of(buffers.master), buffers.list_touched()
            most = self.hyper.clip_row_norm
            update_rows(table, rows, grads, lr=lr, scale=scale, most_norm=most, is_packed=is_packed)


def _list_learnt(units: Sequence[OwnedRanges]) -> list[OwnedRanges]:
    """Those that the rule updates whole: all but running statistics and tables with sparse gradients."""
    return [unit for unit in units if unit.buffers.layout.family not in ("statistics", "sparse")]


def _list_sparse(units: Sequence[OwnedRanges]) -> list[OwnedRanges]:
    """Those of which the rule updates touched rows."""
    return [unit for unit in units if unit.buffers.touched is not None]


def _take_touched(buffers: UnitBuffers) -> Tensor:
    """The gradients of touched rows, [U, W]."""
    rows, grads, is_packed = buffers.list_touched()
    return grads if is_packed else grads.index_select(0, rows)


def _row_square(buffers: UnitBuffers) -> Tensor:
    """The squared norm of the touched rows' gradients."""
    rows, grads, is_packed = buffers.list_touched()
    return _square_sum([grads.view(-1)], grads.device) if is_packed else square_rows(grads, rows)


def _add_statistics(units: Sequence[OwnedRanges]) -> None:
    """Update running statistics: their gradient is what a step adds to them."""
    for buffers in (unit.buffers for unit in units):
        if buffers.layout.family == "statistics":
            for slot in buffers.layout.slots:
                low, high = max(slot.start, buffers.start), min(slot.held, buffers.stop)
                if low < high:
                    here = slice(low - buffers.start, high - buffers.start)
                    buffers.master[here].add_(step_of_statistic(slot.spec, buffers.reduced[here]))


def _parts(units: Sequence[OwnedRanges]) -> tuple[Parts, Parts]:
    """The parts of units with weight decay, and those without; all in fp32."""
    halves: list[list[tuple[Tensor, ...]]] = [[], []]
    for b in (unit.buffers for unit in _list_learnt(units) if unit.buffers.master.dtype == torch.float32):
        border = min(max(b.layout.decayed - b.start, 0), b.stop - b.start)
        border = max(border - b.narrow, 0)
        wide = [buffer[b.narrow :] for buffer in (b.master, b.reduced)]
        for half, part in zip(halves, (slice(0, border), slice(border, None)), strict=True):
            tensors = tuple(buffer[part] for buffer in (*wide, *b.moments.values()))
            if tensors[0].numel():
                half.append(tensors)
    decayed, plain = halves
    return _lists(decayed), _lists(plain)


def _lists(tensors: Sequence[tuple[Tensor, ...]]) -> Parts:
    """The same by kind."""
    params, grads, *moments = map(list, zip(*tensors, strict=True)) if tensors else ([], [])
    return params, grads, moments


def _square_sum(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared norm of all parts: fp32 within rows, which are short enough for that, and fp64 over them."""
    whole = [part.numel() // _ROW * _ROW for part in parts]
    norms = [torch.zeros(1, device=device)]
    norms += [torch.linalg.vector_norm(p[:n].view(-1, _ROW), dim=1) for p, n in zip(parts, whole, strict=True) if n]
    norms += [torch.linalg.vector_norm(p[n:]).view(1) for p, n in zip(parts, whole, strict=True) if n < p.numel()]
    return torch.cat(norms).double().square().sum()

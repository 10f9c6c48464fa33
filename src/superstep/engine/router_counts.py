"""The routing of tokens to experts: their exchange between ranks, and router statistics over several steps.

Each rank adds up its own microbatches on its device, without a wait; the ranks are summed only on request, once every
few steps, in one collective of layers · (2·E + 2) numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from superstep.comm.collectives import sum_over
from superstep.comm.mesh import Mesh
from superstep.engine.parallel.expert import build_exchange
from superstep.engine.step_context import StepContext
from superstep.model.mixture.expert_dispatch import DispatchContext, LayerRouterCounts
from superstep.plan.model.shape import MoeShape
from superstep.plan.resolution.resolve import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingResult:
    """Router statistics by layer.

    Attributes:
        steps: counted training steps.
        chosen: for each expert the (token, choice) pairs that chose it.
        dropped: for each expert those among them beyond its capacity.
        balance: the balance loss, mean over sequences, not weighted.
        z: the z-loss, likewise.
    """

    steps: int
    chosen: tuple[tuple[int, ...], ...]
    dropped: tuple[tuple[int, ...], ...]
    balance: tuple[float, ...]
    z: tuple[float, ...]


class RouterCounts:
    """The counts of one rank.

    Args:
        moe: the mixture.
        layers: of the whole model.
        batch_sequences: of the global batch.
        mesh: the launched ranks.
    """

    def __init__(self, moe: MoeShape, layers: int, batch_sequences: int, mesh: Mesh) -> None:
        self._world = mesh.world
        self._experts = moe.experts
        self._batch_sequences = batch_sequences
        # Ranks that share a sequence all have the counts of the whole; one of them adds them.
        self._is_counted = mesh.at.cp == mesh.at.tp == 0
        # Counts stay exact integers below 2^53.
        self._sums = torch.zeros(layers, 2 * moe.experts + 2, dtype=torch.float64, device=mesh.device.torch)
        self._steps = 0

    def add(self, counts: Mapping[int, LayerRouterCounts]) -> None:
        """Count a training step, by layer."""
        self._steps += 1
        if self._is_counted:
            for layer, t in counts.items():
                self._sums[layer] += torch.cat((t.chosen, t.dropped, torch.stack((t.balance, t.z)))).double()

    def take(self) -> RoutingResult:
        """The counts of all ranks since the last call. Every rank calls this together."""
        sums, steps = sum_over(self._sums.clone(), self._world), self._steps
        self._sums.zero_()
        self._steps = 0
        chosen, dropped, losses = sums.split([self._experts, self._experts, 2], dim=1)
        mean = losses / (self._batch_sequences * max(steps, 1))
        return RoutingResult(
            steps=steps,
            chosen=tuple(tuple(map(int, row)) for row in chosen.tolist()),
            dropped=tuple(tuple(map(int, row)) for row in dropped.tolist()),
            balance=tuple(mean[:, 0].tolist()),
            z=tuple(mean[:, 1].tolist()),
        )


class ExpertRouting:
    """The routing of one rank.

    Args:
        run: the resolved run.
        mesh: the launched ranks.

    Attributes:
        exchange: of tokens with the ranks that hold experts.
        counts: of the training steps; None without experts.
    """

    def __init__(self, run: Resolved, mesh: Mesh) -> None:
        moe, train = run.decoder.moe if run.decoder else None, run.config.train
        self._plan, self._mesh, self._seed = run.plan, mesh, train.seed
        self.exchange = build_exchange(run, mesh)
        self.counts = RouterCounts(moe, run.shape.layers, train.batch_sequences, mesh) if moe else None

    def begin(self, context: StepContext, m: int) -> None:
        """Set the sequences of the ``m``-th microbatch in the exchange."""
        count, rows = len(context.microbatches), self._plan.microbatch
        first = context.microbatches[m].first
        self.exchange.now = DispatchContext(
            sequences=tuple(range(first, first + rows)),
            batch_sequences=count * rows * self._mesh.shape.dp,
            loss_scale=context.loss_scale,
            seed=self._seed,
            step=context.noise_step,
        )

    def end(self, *, is_counted: bool) -> None:
        """Add the statistics of a program's run, or drop them."""
        counts = self.exchange.take_counts()
        if self.counts is not None and is_counted:
            self.counts.add(counts)

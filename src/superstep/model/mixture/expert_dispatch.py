"""The interface of a mixture-of-experts block: the source of its sequences, its experts and its noise.

B  sequences of a microbatch           T  tokens held here: B · s
S  positions of a whole sequence       k  experts of a token
s  positions held here                 E  experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from superstep.model.mixture.biased_experts import BiasedExperts
from superstep.model.mixture.experts import Experts, sort_by_expert, spread, unsort
from superstep.numerics.noise import Noise, SamplePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchContext:
    """The current microbatch.

    Attributes:
        sequences: the number of each row of the microbatch within the global batch.
        batch_sequences: sequences of the global batch: the one divisor of the routers' losses.
        loss_scale: of fp16, their factor; else 1.
        seed: of the run.
        step: of the run; None in evaluation, without noise.
    """

    sequences: tuple[int, ...] = ()
    batch_sequences: int = 1
    loss_scale: float = 1.0
    seed: int = 0
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouterCounts:
    """Statistics of one layer's router for the whole sequences of a microbatch, on its device.

    Attributes:
        chosen: [E], (token, choice) pairs that chose each expert.
        dropped: [E], those among them beyond its capacity.
        balance: the sequences' balance losses, summed; not weighted.
        z: the sequences' z-losses, summed; not weighted.
    """

    chosen: Tensor
    dropped: Tensor
    balance: Tensor
    z: Tensor

    def __add__(self, other: LayerRouterCounts) -> LayerRouterCounts:
        return LayerRouterCounts(
            chosen=self.chosen + other.chosen,
            dropped=self.dropped + other.dropped,
            balance=self.balance + other.balance,
            z=self.z + other.z,
        )


class ExpertDispatch(Protocol):
    """A block's exchange with other ranks. Ranks that hold parts of the same sequences all compute the same routing for
    the whole; each then sends its own tokens to the experts and back.
    """

    now: DispatchContext
    """Set it before each forward, and before each backward that repeats a forward."""

    def whole(self, x_BsE: Tensor) -> Tensor:
        """Whole sequences, [B, S, E], from the ranks' parts; backward takes the own part."""

    def share(self, x_BSk: Tensor) -> Tensor:
        """The own part of whole sequences: [B, s, k]."""

    def noise(self, layer: int, S: int, width: int) -> Tensor | None:
        """[B, S, width] draws of normal(0, 1): a function of seed, step, layer, sequence and position alone. None in
        evaluation.
        """

    def run(self, x_TD: Tensor, expert_Tk: Tensor, experts: Experts | BiasedExperts) -> Tensor:
        """Each token through its experts, by their global numbers: [T, k, D], zeros for NOBODY."""

    def tell(self, layer: int, counts: LayerRouterCounts) -> None:
        """Record a router's statistics. A repeated record for the same sequences, as in recompute, counts once."""


class LocalDispatch:
    """All sequences whole, and all experts here.

    Args:
        now: the first sequences.
        parts: exact mode: number of parts of each sequence here, with separately summed gradients.
    """

    def __init__(self, now: DispatchContext | None = None, *, parts: int | None = None) -> None:
        self.now = now or DispatchContext()
        self._parts = parts
        self._counts: dict[tuple[int, tuple[int, ...]], LayerRouterCounts] = {}

    def whole(self, x_BsE: Tensor) -> Tensor:
        return x_BsE

    def share(self, x_BSk: Tensor) -> Tensor:
        return x_BSk

    def noise(self, layer: int, S: int, width: int) -> Tensor | None:
        now = self.now
        if now.step is None or not width:
            return None
        like = torch.empty(1, S, width, device="cpu")
        places = (SamplePlace(seed=now.seed, step=now.step, sample=n, is_training=True) for n in now.sequences)
        return torch.cat([Noise(place).normal(f"router.{layer}", like) for place in places])

    def run(self, x_TD: Tensor, expert_Tk: Tensor, experts: Experts | BiasedExperts) -> Tensor:
        order_R, rows_E = sort_by_expert(expert_Tk, experts.held)
        y_RD = experts(spread(x_TD, order_R, expert_Tk.shape[1]), rows_E, self._part(order_R, expert_Tk))
        return unsort(y_RD, order_R).view(*expert_Tk.shape, -1)

    def _part(self, order_R: Tensor, expert_Tk: Tensor) -> Tensor | None:
        """The part of the sequence of each row."""
        if self._parts is None:
            return None
        T, k = expert_Tk.shape
        held = T // len(self.now.sequences)
        return order_R // k % held // (held // self._parts)

    def tell(self, layer: int, counts: LayerRouterCounts) -> None:
        self._counts[layer, self.now.sequences] = counts

    def take_counts(self) -> dict[int, LayerRouterCounts]:
        """For each layer, its router's statistics since the last call."""
        total: dict[int, LayerRouterCounts] = {}
        for (layer, _), counts in self._counts.items():
            total[layer] = total[layer] + counts if layer in total else counts
        self._counts.clear()
        return total

"""Expert parallelism: each rank holds some of the experts, and tokens are sent to them and back (Lepikhin 2020).

ep folds over the dp · cp · tp ranks of a pipeline stage: ep neighbours, tp counted fastest, share the experts. Every
rank sends its own tokens, and no token is there twice:

    routing    the logits of whole sequences are gathered among the ranks that hold parts of them; each decides
               alike, for the whole, and keeps the decisions for its own tokens
    experts    all-to-all over ep: first the numbers of rows, then the rows; the same way back
    tp         with sequence parallelism tokens are split already; without, the block takes its share of them
               before and gathers after

So router, shared experts and the norm before them are whole on each rank and process its tokens alone: their gradients
are partial over every axis that splits tokens, tp included. An expert's gradient is whole for its ep group.

    B  sequences            T  tokens held here: B · s       R  rows: T · k (token, choice) pairs
    S  positions            k  experts of a token            P  ranks
    s  positions held here  E  experts                       A  rows that arrive here
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from superstep.comm.collectives import gather_sequence
from superstep.comm.mesh import Group, Mesh
from superstep.engine.layers.implementation import Forward, Implementation
from superstep.engine.parallel.sequence_parallel import GatherWhole, KeepOwn
from superstep.model.mixture.biased_experts import BiasedExperts
from superstep.model.mixture.expert_dispatch import DispatchContext, ExpertDispatch, LocalDispatch
from superstep.model.mixture.experts import Experts, sort_by_expert, spread, unsort
from superstep.model.moe import MixtureOfExperts
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.sharding.sequence import positions


@dataclass(frozen=True, kw_only=True)
class SequenceParts:
    """The split of sequences over a group's ranks.

    Attributes:
        group: ranks that hold parts of the same sequences.
        positions: [P, s], the positions on each rank, in its order.
    """

    group: Group
    positions: Tensor

    @property
    def mine(self) -> Tensor:
        """The positions held here: [s]."""
        return self.positions[self.group.rank()]


class ExpertParallel(LocalDispatch):
    """The exchange of a rank that holds a part of the experts, of the sequences, or of both.

    Args:
        experts: the ep ranks' group; None where every expert is here.
        sequence: how sequences are split; None where they are whole.
        now: the first sequences.
        parts: exact mode: number of parts of each sequence on this rank.
    """

    def __init__(
        self,
        experts: Group | None,
        sequence: SequenceParts | None,
        now: DispatchContext | None = None,
        *,
        parts: int | None = None,
    ) -> None:
        super().__init__(now, parts=parts)
        self._experts = experts
        self._sequence = sequence

    def whole(self, x_BsE: Tensor) -> Tensor:
        if self._sequence is None:
            return x_BsE
        return cast(Tensor, _Whole.apply(x_BsE, self._sequence))  # type: ignore[no-untyped-call]

    def share(self, x_BSk: Tensor) -> Tensor:
        return x_BSk if self._sequence is None else x_BSk.index_select(1, self._sequence.mine)

    def run(self, x_TD: Tensor, expert_Tk: Tensor, experts: Experts | BiasedExperts) -> Tensor:
        group = self._experts
        if group is None:
            return super().run(x_TD, expert_Tk, experts)
        order_R, rows_E = sort_by_expert(expert_Tk, experts.held * group.size())
        going_PE = rows_E.view(group.size(), experts.held)
        coming_PE = torch.empty_like(going_PE)
        dist.all_to_all_single(coming_PE, going_PE.contiguous(), group=group)
        # A GPU is waited for, once: an exchange of unequal parts needs their sizes on the host.
        going, coming = torch.stack((going_PE, coming_PE)).sum(2).tolist()
        # Rows arrive by rank and expert; products need them by expert.
        expert_A = torch.arange(experts.held, device=x_TD.device).repeat(group.size())
        expert_A = expert_A.repeat_interleave(coming_PE.flatten(), output_size=sum(coming))
        order_A, held_E = sort_by_expert(expert_A[:, None], experts.held)
        part_A = self._origins(self._part(order_R, expert_Tk), going, coming, group)
        part_A = None if part_A is None else part_A[order_A]
        # One name for all, as each copy of the rows is as large: it is free once the next is there.
        rows = spread(x_TD, order_R, expert_Tk.shape[1])
        rows = _travel(rows, going, coming, sum(coming), group)
        rows = spread(rows, order_A, 1)
        rows = experts(rows, held_E, part_A)
        rows = unsort(rows, order_A)
        rows = _travel(rows, coming, going, len(order_R), group)
        return unsort(rows, order_R).view(*expert_Tk.shape, -1)

    def _origins(self, part_R: Tensor | None, going: list[int], coming: list[int], group: Group) -> Tensor | None:
        """The rank and part of the sequence of each arrived row."""
        if part_R is None or self._parts is None:
            return None
        part_A = part_R.new_empty(sum(coming))
        dist.all_to_all_single(part_A, part_R[: sum(going)].contiguous(), coming, going, group=group)
        rank_P = torch.arange(group.size(), device=part_R.device)
        rank_A = rank_P.repeat_interleave(part_A.new_tensor(coming), output_size=len(part_A))
        return rank_A * self._parts + part_A


def build_exchange(run: Resolved, mesh: Mesh) -> ExpertParallel:
    """The exchange of the plan. Sequences are split over cp, and over tp with sequence parallelism or without."""
    sequence = None
    if mesh.sequence is not None:
        cp, tp, tokens = mesh.shape.cp, mesh.shape.tp, run.config.data.sequence_tokens
        held = [positions(tokens, cp=cp, rank=c, tp=tp, part=t) for c in range(cp) for t in range(tp)]
        sequence = SequenceParts(group=mesh.sequence, positions=torch.tensor(held, device=mesh.device.torch))
    grain = run.plan.grain
    parts = None if grain is None else grain.parts // (mesh.shape.cp * mesh.shape.tp)
    return ExpertParallel(mesh.ep, sequence, parts=parts)


def _travel(x: Tensor, going: list[int], coming: list[int], rows: int, group: Group) -> Tensor:
    out: Tensor = Travel.apply(x, going, coming, rows, group)  # type: ignore[no-untyped-call]
    return out


class Travel(torch.autograd.Function):
    """All-to-all of rows: the first ``going[p]`` to rank p, ``coming[p]`` from it; the gradient goes back.

    The result has ``rows`` rows, with zeros after those that arrived: padding rows are not sent.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, going: list[int], coming: list[int], rows: int, group: Group) -> Tensor:  # noqa: ANN401
        ctx.way = going, coming, len(x), group
        return _all_to_all(x, going, coming, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # noqa: ANN401
        going, coming, rows, group = ctx.way
        return _all_to_all(grad.contiguous(), coming, going, rows, group), None, None, None, None


def _all_to_all(x: Tensor, going: list[int], coming: list[int], rows: int, group: Group) -> Tensor:
    # Gloo supports this too, as fast as messages of our own (2 and 4 ranks, 1 MB to each).
    out = x.new_empty(rows, x.shape[1])
    arrived = sum(coming)
    dist.all_to_all_single(out[:arrived], x[: sum(going)], coming, going, group=group)
    out[arrived:].zero_()
    return out


class _Whole(torch.autograd.Function):
    """Forward gathers whole sequences, backward takes the own part.

    Every rank of the group computes the same from the whole, so each has the whole gradient already, apart from that of
    its own tokens' outputs, which is zero elsewhere: there is nothing to sum.
    """

    @staticmethod
    def forward(ctx: Any, x_BsE: Tensor, parts: SequenceParts) -> Tensor:  # noqa: ANN401
        ctx.mine = parts.mine
        gathered = gather_sequence(x_BsE, parts.group)
        return torch.empty_like(gathered).index_copy_(1, parts.positions.flatten(), gathered)

    @staticmethod
    def backward(ctx: Any, grad_BSE: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grad_BSE.index_select(1, ctx.mine), None


def splitting_tokens(tp: Group) -> tuple[Implementation, ...]:
    """A mixture of experts with a whole input on every tp rank: each works on its share."""

    def build(path: str, block: nn.Module, inner: Forward) -> Forward:
        def forward(x_BSD: Tensor, *, exchange: ExpertDispatch) -> Tensor:
            y_BSD: Tensor = GatherWhole.apply(inner(KeepOwn.apply(x_BSD, tp), exchange=exchange), tp)  # type: ignore[no-untyped-call]
            return y_BSD

        return forward

    return (
        Implementation(
            "tokens split over tp", "plan.tp", lambda path, layer: isinstance(layer, MixtureOfExperts), build
        ),
    )

"""Ulysses (Jacobs 2023): during attention, a rank exchanges its tokens of all heads for all tokens of its heads.

B  sequences    N  query heads           S  positions    s  a rank's own tokens
                K  key and value heads   H  width of one head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from superstep.comm.mesh import Group
from superstep.engine.parallel.zigzag import by_rank, in_order
from superstep.kernels.position_bias import Bias
from superstep.model.decoder import Attend, flash
from superstep.plan.model.attention_rule import PLAIN, AttentionRule


@dataclass(frozen=True, slots=True)
class UlyssesAttend:
    """Causal attention of a sequence cut in zig-zag over the ranks of ``group``, as ``model.decoder.Attend``.

    Inputs and output are the rank's own tokens, in the order of ``plan.sharding.sequence.positions``; ``inner`` sees
    the whole sequence in order. The group's size is one of ``plan.sharding.sequence.cp_of_heads``. With more ranks than
    key and value heads, each head is sent to all ranks of its queries, and their gradients for it are summed.
    """

    group: Group
    inner: Attend = flash

    def __call__(
        self,
        q_BsNH: Tensor,
        k_BsKH: Tensor,
        v_BsKH: Tensor,
        rule: AttentionRule = PLAIN,
        bias: Bias | None = None,
        sinks_BsN: Tensor | None = None,
    ) -> Tensor:
        """The attention output: [B, s, N, H]."""
        ranks = self.group.size()
        if bias is not None:
            own = q_BsNH.shape[2] // ranks
            bias = bias.of_heads(self.group.rank() * own, own)
        heads = [_heads_by_rank(x, ranks) for x in (q_BsNH, k_BsKH, v_BsKH)]
        packed = torch.cat(heads, dim=3).movedim(2, 0)
        whole = in_order(_exchange(packed, self.group).unbind())
        q, k, v = whole.split([x.shape[3] for x in heads], dim=2)
        sinks = () if sinks_BsN is None else (self._sinks_of_own_heads(sinks_BsN),)
        mixed = by_rank(self.inner(q, k, v, rule, bias, *sinks), ranks)
        out_BsNH: Tensor = _exchange(mixed, self.group).movedim(0, 2).flatten(2, 3)
        return out_BsNH

    def _sinks_of_own_heads(self, sinks_BsN: Tensor) -> Tensor:
        """[B, S, n]: exchanged as queries are, so that a rank has the gradients of its own tokens' sinks."""
        by_head = _heads_by_rank(sinks_BsN.unsqueeze(-1), self.group.size())
        return in_order(_exchange(by_head.movedim(2, 0), self.group).unbind()).squeeze(-1)


def _heads_by_rank(x_BsNH: Tensor, ranks: int) -> Tensor:
    """The heads that each rank needs, [B, s, ranks, n, H]: its share of them, or the one it shares with its
    neighbours.
    """
    B, s, heads, H = x_BsNH.shape
    if heads < ranks:
        return x_BsNH.unsqueeze(3).expand(B, s, heads, ranks // heads, H).reshape(B, s, ranks, 1, H)
    shares: Tensor = x_BsNH.unflatten(2, (ranks, heads // ranks))
    return shares


def _exchange(x: Tensor, group: Group) -> Tensor:
    """``x[r]`` is sent to rank r; the tensor from rank r is at [r]."""
    out: Tensor = Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class Exchange(torch.autograd.Function):
    """All-to-all of equal parts, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad, group=ctx.group)
        return out, None

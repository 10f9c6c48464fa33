"""A sequence cut in zig-zag over the ranks of a group: gathered in order, and cut again.

Plain functions for tensors of any dtype. Each is the other's transpose: gathering sends a rank's tokens to all ranks,
and ``scatter_sum`` sums all ranks' contributions to a rank's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from superstep.comm.collectives import all_gather, reduce_scatter
from superstep.comm.mesh import Group


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The ranks' parts [B, s, ...], each two chunks of the sequence, as the sequence [B, S, ...]."""
    pairs = [part.chunk(2, dim=1) for part in parts]
    return torch.cat([early for early, _ in pairs] + [late for _, late in reversed(pairs)], dim=1)


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """The inverse of ``in_order``, stacked: [ranks, B, s, ...]."""
    chunks = x.chunk(2 * ranks, dim=1)
    return torch.stack([torch.cat((chunks[r], chunks[-1 - r]), dim=1) for r in range(ranks)])


def gather_kv(x_BsKH: Tensor, group: Group) -> Tensor:
    """Every rank's tokens in the order of the sequence: [B, S, K, H]."""
    parts = x_BsKH.new_empty(group.size(), *x_BsKH.shape)
    parts[group.rank()] = x_BsKH
    all_gather(parts.view(-1), group, tag=0).wait()
    return in_order(parts.unbind())


def scatter_sum(x_BSKH: Tensor, group: Group) -> Tensor:
    """The sum over ranks of their tensors of the whole sequence, for this rank's tokens: [B, s, K, H].

    On a CPU it is a sum in rank order. Only for integers the bits do not depend on the order.
    """
    parts = by_rank(x_BSKH, group.size())
    reduce_scatter(parts.view(-1), group, tag=0).wait()
    return parts[group.rank()].clone()

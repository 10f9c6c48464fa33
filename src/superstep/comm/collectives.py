"""Collectives on flat buffers, started now and waited for later.

On NCCL and over shared memory these are the library's own. Gloo's reduce-scatter is an all-reduce with copies, and its
gather copies too, so over Gloo both are direct exchanges: every rank sends each other rank its part, and sums what
arrives in rank order, which also makes the sum the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from superstep.comm.backend import has_gloos_calls
from superstep.comm.mesh import Group
from superstep.comm.shared_memory.group_base import gather_single, scatter_single, start
from superstep.numerics.sending import send as to_device


class PendingCollective(Protocol):
    """An operation in progress."""

    def wait(self) -> None:
        """Return once its result may be used (on a GPU: by work issued after)."""

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""


@dataclass(frozen=True)
class _Works:
    """Works of the process group, and what to do once all are complete."""

    works: tuple[dist.Work, ...]
    after: Callable[[], None] = field(default=lambda: None)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.after()

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)


DONE: PendingCollective = _Works(())


@dataclass(frozen=True)
class _Together:
    parts: Sequence[PendingCollective]

    def wait(self) -> None:
        for part in self.parts:
            part.wait()

    def is_done(self) -> bool:
        return all(part.is_done() for part in self.parts)


def together(parts: Sequence[PendingCollective]) -> PendingCollective:
    """Several operations as one."""
    return parts[0] if len(parts) == 1 else _Together(parts)


@dataclass(frozen=True)
class FollowedCollective:
    """An operation, and what to do with its result once it is there."""

    operation: PendingCollective
    after: Callable[[], object]

    def wait(self) -> None:
        self.operation.wait()
        self.after()

    def is_done(self) -> bool:
        return self.operation.is_done()


def all_reduce(buffer: Tensor, group: Group) -> PendingCollective:
    """Sum ``buffer`` over the group, in place."""
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    return _Works((work,))


def reduce_scatter(buffer: Tensor, group: Group, *, tag: int) -> PendingCollective:
    """Sum ``buffer`` over the group; each rank's own part of it, in place, holds the sum. The rest is undefined.

    Concurrent operations on one group need different tags.
    """
    size, me = group.size(), group.rank()
    parts = buffer.chunk(size)
    if not has_gloos_calls(group):
        work = scatter_single(parts[me], buffer, group=group, async_op=True)
        return _Works((work,))
    arrived = buffer.new_empty(size, parts[me].numel())
    works: list[dist.Work] = []
    for step in range(1, size):
        target, source = (me + step) % size, (me - step) % size
        works += [
            start(dist.isend(parts[target], group=group, group_dst=target, tag=tag)),
            start(dist.irecv(arrived[source], group=group, group_src=source, tag=tag)),
        ]

    def add() -> None:
        # Rank order, whoever adds: the sum's bits are the same however the messages came in.
        if me == 0:
            for source in range(1, size):
                parts[me].add_(arrived[source])
            return
        total = arrived[0]
        for source in range(1, size):
            total.add_(parts[me] if source == me else arrived[source])
        parts[me].copy_(total)

    return _Works(tuple(works), add)


def all_gather(buffer: Tensor, group: Group, *, tag: int) -> PendingCollective:
    """Fill ``buffer`` from the parts of the group's ranks; this rank's own part is already in place."""
    size, me = group.size(), group.rank()
    parts = buffer.chunk(size)
    if not has_gloos_calls(group):
        return _Works((gather_single(buffer, parts[me], group=group, async_op=True),))
    works: list[dist.Work] = []
    for step in range(1, size):
        target, source = (me + step) % size, (me - step) % size
        works += [
            start(dist.isend(parts[me], group=group, group_dst=target, tag=tag)),
            start(dist.irecv(parts[source], group=group, group_src=source, tag=tag)),
        ]
    return _Works(tuple(works))


def send(tensor: Tensor, group: Group, target: int, tag: int) -> PendingCollective:
    """Start sending to the group's rank ``target``; the tensor must not change until waited for."""
    return _Works((start(dist.isend(tensor, group=group, group_dst=target, tag=_tag(group, tag))),))


def receive(tensor: Tensor, group: Group, source: int, tag: int) -> PendingCollective:
    """Start receiving from the group's rank ``source``."""
    return _Works((start(dist.irecv(tensor, group=group, group_src=source, tag=_tag(group, tag))),))


def _tag(group: Group, tag: int) -> int:
    # NCCL has none, and what came out of order would be taken for what was asked for: so too where Gloo stands for it.
    return tag if has_gloos_calls(group) else 0


def sum_over(values: Tensor, group: Group | None) -> Tensor:
    """Sum a tensor over the group's ranks, in place; without a group it stays."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def unite(marks: Tensor, group: Group) -> None:
    """Set the marks, uint8, that are set on any rank of the group."""
    dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=group)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """[B, s, ...] of every rank, side by side along the sequence: [B, s · size, ...]."""
    return torch.cat(stack_ranks(x, group).unbind(), dim=1)


def scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks of [B, S, ...]; each keeps its part of the sequence: [B, S / size, ...]."""
    size, me = group.size(), group.rank()
    parts = torch.stack(x.chunk(size, dim=1))
    if not has_gloos_calls(group):
        out = torch.empty_like(parts[0])
        scatter_single(out.view(-1), parts.view(-1), group=group)
        return out
    dist.all_reduce(parts, group=group)
    return parts[me].clone()


def stack_ranks(x: Tensor, group: Group) -> Tensor:
    """Every rank's tensor, in rank order: [size, ...]."""
    out = x.new_empty(group.size(), *x.shape)
    gather_single(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def from_first(numbers: Sequence[int], group: Group, device: torch.device) -> list[int]:
    """The numbers of the group's first rank, on every rank; the others' values are ignored."""
    count = to_device(torch.tensor([len(numbers)]), device)
    dist.broadcast(count, group=group, group_src=0)
    if group.rank() == 0:
        dist.broadcast(to_device(torch.tensor(numbers, dtype=torch.int64), device), group=group, group_src=0)
        return list(numbers)  # they are not read back, for which the host would wait
    values = torch.zeros(int(count), dtype=torch.int64, device=device)
    dist.broadcast(values, group=group, group_src=0)
    received: list[int] = values.tolist()
    return received

"""NCCL's calls on Gloo's groups, and what NCCL does to a host that makes them.

    with nccl_on_gloo() as wire:      on every rank: meshes built inside have NCCL's calls
        ...
    wire.first_uses                   the channels' first uses in order, each with whether a mesh was being built

Gloo has what NCCL's branches call. What it lacks is put on top here: a transfer between two ranks that have not met on
its group keeps its host until both have, and one that waits for too long has crossed with another. Tags are refused,
for NCCL has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

from superstep.comm import backend, collectives
from superstep.comm.backend import Transport
from superstep.comm.mesh import build_mesh

EMULATED = Transport(backend="gloo", calls="nccl")


class CrossedError(Exception):
    """Two ranks met nowhere: each waits at a first use that the other comes to only after its own."""


@dataclass(frozen=True)
class FirstUse:
    """A rank's first transfer on a group.

    Attributes:
        group: the name of the group.
        ranks: its ranks, as the world numbers them.
        is_ahead: whether a mesh was being built, and not a program run.
    """

    group: str
    ranks: tuple[int, ...]
    is_ahead: bool


@dataclass
class Wire:
    """What went over channels on this rank.

    Attributes:
        patience_s: how long a first use may wait.
        first_uses: in order.
        transfers: how many there were in all.
        building: whether a mesh is being built.
    """

    patience_s: float
    first_uses: list[FirstUse] = field(default_factory=list)
    transfers: int = 0
    building: bool = False

    def meet(self, group: dist.ProcessGroup, peer: int) -> None:
        """Wait for the peer, if this is the first time."""
        self.transfers += 1
        assert peer != group.rank(), "a rank sends nothing to itself"
        if any(use.group == group.group_name for use in self.first_uses):
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        assert len(ranks) == 2, "a transfer has a group of its two ranks alone"
        self.first_uses.append(FirstUse(group.group_name, ranks, self.building))
        store = dist.distributed_c10d._get_default_store()
        store.set(f"met/{group.group_name}/{group.rank()}", "here")
        try:
            store.wait([f"met/{group.group_name}/{peer}"], timedelta(seconds=self.patience_s))
        except RuntimeError as error:
            raise CrossedError(f"rank {dist.get_rank()} waits on {ranks} for a peer that does not come") from error


class _Calls:
    """``torch.distributed`` with transfers as NCCL has them."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def _transfer(self, call: Callable[..., Any], tensor: Any, group: dist.ProcessGroup, **peer: int) -> Any:
        assert not peer.pop("tag", 0), "NCCL has no tags"
        self._wire.meet(group, next(iter(peer.values())))
        return call(tensor, group=group, **peer)

    def isend(self, tensor: Any, *, group: dist.ProcessGroup, **peer: int) -> Any:
        return self._transfer(dist.isend, tensor, group, **peer)

    def irecv(self, tensor: Any, *, group: dist.ProcessGroup, **peer: int) -> Any:
        return self._transfer(dist.irecv, tensor, group, **peer)

    def send(self, tensor: Any, *, group: dist.ProcessGroup, **peer: int) -> Any:
        return self._transfer(dist.send, tensor, group, **peer)

    def recv(self, tensor: Any, *, group: dist.ProcessGroup, **peer: int) -> Any:
        return self._transfer(dist.recv, tensor, group, **peer)


@contextmanager
def nccl_on_gloo(*users: Any, patience_s: float = 20.0) -> Iterator[Wire]:
    """Within the block the ``users``, modules that call ``build_mesh`` by that name, get meshes with NCCL's calls."""
    wire = Wire(patience_s)

    @functools.wraps(build_mesh)
    def building(*args: Any, **given: Any) -> Any:
        wire.building = True
        try:
            return build_mesh(*args, **given, transport=EMULATED)
        finally:
            wire.building = False

    with ExitStack() as stack:
        for module in (collectives, backend):
            stack.enter_context(mock.patch.object(module, "dist", _Calls(wire)))
        for module in users:
            stack.enter_context(mock.patch.object(module, "build_mesh", building))
        yield wire

"""Synchronisation of ranks with the same parameters: gather them, and sum their gradients; of tables with sparse
gradients only the touched rows.

Frozen weights are gathered and never summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from superstep.comm.collectives import PendingCollective, all_gather, all_reduce, reduce_scatter, together
from superstep.comm.mesh import Group, Mesh
from superstep.engine.flat.buffers import UnitBuffers
from superstep.engine.flat.touched_rows import reduce_rows
from superstep.plan.mesh import FAMILIES


def fetch(buffers: Sequence[UnitBuffers], mesh: Mesh, unit: int) -> PendingCollective:
    """Start gathering a unit's parameters from their shards."""
    started: list[PendingCollective] = []
    for number, each in enumerate(buffers):
        group = mesh.sharers[each.layout.family].fetch
        if each.zero and group is not None:
            each.restore_full()
            each.refresh()
            # Two buffers of a unit may use the same group.
            started.append(all_gather(each.full, group, tag=len(FAMILIES) * unit + number))
    return together(started)


def reduce(trained: Sequence[UnitBuffers], mesh: Mesh, unit: int) -> PendingCollective:
    """Start summing a unit's gradients over the shards."""
    started: list[PendingCollective] = []
    for buffers in trained:
        group = mesh.sharers[buffers.layout.family].reduce
        if group is not None and buffers.touched is not None:
            tag, packs = unit if buffers.zero else None, not buffers.shards_gradients
            started.append(reduce_rows(buffers.gradient, buffers.touched, group, tag=tag, packs=packs))
        elif group is not None and buffers.zero:
            started.append(reduce_scatter(buffers.gradient, group, tag=unit))
        elif group is not None:
            started.append(all_reduce(buffers.gradient, group))
    return together(started)


def reduce_replicas(trained: Sequence[UnitBuffers], mesh: Mesh) -> PendingCollective:
    """Start summing a unit's settled gradients over the replicas."""
    started: list[PendingCollective] = []
    for buffers in trained:
        group = mesh.sharers[buffers.layout.family].replicas
        if group is not None:
            started.append(_reduce_shard(buffers, group))
    return together(started)


def tie(trained: Sequence[UnitBuffers], group: Group) -> None:
    """Sum the gradients of parameters that several pipeline ranks hold."""
    for buffers in trained:
        _reduce_shard(buffers, group).wait()


def _reduce_shard(buffers: UnitBuffers, group: Group) -> PendingCollective:
    if buffers.touched is None:
        return all_reduce(buffers.gradient_shard, group)
    packs = not buffers.shards_gradients
    return reduce_rows(buffers.gradient_shard, buffers.touched, group, start=buffers.start, packs=packs)


def reduce_partial(trained: Iterable[UnitBuffers], tp: Group) -> None:
    """One sum over tp for all units: their partial gradients are few and small."""
    pieces = []
    for buffers in trained:
        for first, last in buffers.layout.partial:
            low, high = max(first, buffers.start) - buffers.start, min(last, buffers.stop) - buffers.start
            if low < high:
                pieces.append(buffers.gradient_shard[low:high])
    if not pieces:
        return
    total = torch.cat(pieces)
    all_reduce(total, tp).wait()
    for piece, summed in zip(pieces, total.split([len(p) for p in pieces]), strict=True):
        piece.copy_(summed)

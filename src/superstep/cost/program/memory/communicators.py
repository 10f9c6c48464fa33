"""Communicators: NCCL's memory on a GPU for each group of a rank, outside any allocator.

NCCL has buffers for each channel of each communicator, and for each rank with direct exchange; torch's communicators
share none. Measured with the usual settings:

    a group of two; a larger one      544 MiB; 688 MiB       4 A100, 24 channels    NVIDIA/nccl #964, #1785
    a first all-to-all among eight    1.06 to 4.34 GB        8 H100, 32 channels    NVIDIA/nccl #1685

It is linear in the channels, so ``NCCL_MAX_NCHANNELS`` reduces it, and beyond two hosts it does not grow with the ranks
(#864, #986). Other GPUs and versions of NCCL have other figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from superstep.cost.closed.memory import COMMUNICATOR_BYTES
from superstep.plan.mesh import Coordinate
from superstep.plan.resolution.resolve import Plan
from superstep.program.p2p_setup import find_tied_places, routes

PAIR_BYTES = 544 * 2**20
"""A communicator of two ranks."""

MANY_BYTES = 688 * 2**20
"""One of more ranks."""

PEER_BYTES = int((4.34e9 - 1.06e9) / 7)
"""For each rank with direct exchange, beside the rings and trees of a communicator."""

MOST_PEERS = 7
"""The most such ranks: those of a host of eight. Ranks of other hosts share a pool."""


def communicator_bytes(plan: Plan) -> tuple[int, ...]:
    """Bytes of a rank at each pipeline place, on a GPU: equal at its dp, cp and tp places."""
    ranks = [plan.mesh.rank(Coordinate(pp=pp, dp=0, cp=0, tp=0)) for pp in range(plan.mesh.pp)]
    taken = dict.fromkeys(ranks, PEER_BYTES * min(_peers(plan), MOST_PEERS))
    for group in rank_groups(plan):
        for rank in taken.keys() & group:
            taken[rank] += PAIR_BYTES if len(group) == 2 else MANY_BYTES
    return tuple(taken[rank] for rank in ranks)


def beyond_reserve(plan: Plan) -> int:
    """Bytes of the fullest rank beyond what a search keeps free for every plan (``COMMUNICATOR_BYTES``)."""
    return max(0, max(communicator_bytes(plan)) - int(COMMUNICATOR_BYTES))


def rank_groups(plan: Plan) -> Iterator[Sequence[int]]:
    """The groups of all ranks, as ``comm.mesh`` makes them for NCCL."""
    mesh = plan.mesh
    stages = mesh.groups("pp")
    made: list[Iterable[Sequence[int]]] = [[range(mesh.world)], mesh.groups("cp"), mesh.groups("tp")]
    for family in plan.families:
        if family in ("dense", "experts"):  # the others share the groups of the dense parameters
            # Parameters and gradients have one each, so that they overlap.
            made += [mesh.shard_groups(family), mesh.shard_groups(family), mesh.replica_groups(family)]
    if "experts" in plan.families:
        made += [mesh.expert_groups(), mesh.sequence_groups()]
    channels = routes(plan.placement, plan.encoders)
    made += [[(ranks[source], ranks[target]) for ranks in stages] for source, target, _ in channels]
    made += [[[ranks[each] for each in places] for ranks in stages] for places in find_tied_places(plan)]
    return (ranks for groups in made for ranks in groups if len(ranks) > 1)


def _peers(plan: Plan) -> int:
    """Ranks with direct exchange: those with other experts, and those with other tokens of the same sequences, or with
    a ring the neighbour.
    """
    experts = plan.mesh.ep - 1 if "experts" in plan.families else 0
    return experts + (min(plan.mesh.cp - 1, 1) if plan.context == "ring" else plan.mesh.cp - 1)

"""The Mesh: this rank's place, and a process group for each axis and lane.

NCCL runs the operations of one group in the order of issue on a stream of the group's own, so a group *is* a lane:
what must overlap has groups of its own. Transfers between pipeline ranks have one group for each channel (from, to,
wire) on NCCL; on Gloo one group serves them all, because its messages carry tags.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch.distributed as dist

from superstep.plan.mesh import Axis, Coordinate, MeshShape
from superstep.program.instructions import Wire
from superstep.runtime.device import Device

Group = dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The launched ranks, seen from one of them.

    Attributes:
        shape: the degree of each axis.
        rank: this rank's number.
        at: this rank's place.
        device: where this rank computes.
        fetch: the dp ranks' group for gathering parameters; None where dp = 1.
        reduce: the dp ranks' group for summing gradients; None where dp = 1.
        tp: the tp ranks' group; None where tp = 1.
        pp: the pp ranks' group; None where pp = 1.
        channels: NCCL only: the group of each channel this rank takes part in.
        ties: for each set of pipeline ranks that share parameters, the group of those at this dp and tp place.
    """

    shape: MeshShape
    rank: int
    at: Coordinate
    device: Device
    fetch: Group | None
    reduce: Group | None
    tp: Group | None
    pp: Group | None
    channels: dict[tuple[int, int, Wire], Group]
    ties: dict[tuple[int, ...], Group]

    def peer(self, pp: int) -> int:
        """The number of the rank at another pipeline place, everything else equal."""
        return self.shape.rank(Coordinate(pp=pp, dp=self.at.dp, cp=self.at.cp, tp=self.at.tp))

    def destroy(self) -> None:
        """Give the groups back."""
        groups = [self.fetch, self.reduce, self.tp, self.pp, *self.channels.values(), *self.ties.values()]
        for group in groups:
            if group is not None:
                dist.destroy_process_group(group)


def routes(placement: tuple[int, ...]) -> list[tuple[int, int, Wire]]:
    """The channels (from, to, wire) between pipeline ranks: activations to the next stage's, gradients back."""
    found: dict[tuple[int, int, Wire], None] = {}
    for here, there in pairwise(placement):
        if here != there:
            found |= {(here, there, "act"): None, (there, here, "grad"): None}
    return list(found)


def build_mesh(
    shape: MeshShape,
    rank: int,
    device: Device,
    *,
    placement: tuple[int, ...],
    ties: tuple[tuple[int, ...], ...],
    timeout: timedelta,
) -> Mesh:
    """Make the groups. Every rank calls this at the same time with the same arguments.

    Args:
        shape: the degrees; their product is the number of launched ranks.
        rank: this rank's number.
        device: where this rank computes.
        placement: the pipeline rank of each stage.
        ties: the sets of pipeline ranks that share parameters.
        timeout: how long a collective may wait.
    """

    def mine(members: list[list[int]]) -> Group | None:
        """One group out of each list; the one that has this rank. Every rank must make every group."""
        found: Group | None = None
        for ranks in members:
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=timeout, backend=device.backend)
                found = group if rank in ranks else found
        return found

    def axis(name: Axis) -> Group | None:
        return mine(shape.groups(name))

    fetch, reduce, tp, pp = axis("dp"), axis("dp"), axis("tp"), axis("pp")
    tie_groups: dict[tuple[int, ...], Group] = {}
    for places in ties:
        group = mine([[ranks[p] for p in places] for ranks in shape.groups("pp")])
        if group is not None:
            tie_groups[places] = group
    channels: dict[tuple[int, int, Wire], Group] = {}
    if device.backend == "nccl" and shape.pp > 1:
        for source, target, wire in routes(placement):
            group = mine([[ranks[source], ranks[target]] for ranks in shape.groups("pp")])
            if group is not None:
                channels[source, target, wire] = group
    return Mesh(
        shape=shape,
        rank=rank,
        at=shape.at(rank),
        device=device,
        fetch=fetch,
        reduce=reduce,
        tp=tp,
        pp=pp,
        channels=channels,
        ties=tie_groups,
    )

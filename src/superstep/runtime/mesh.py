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

from superstep.plan.mesh import FAMILIES, Axis, Coordinate, Family, MeshShape
from superstep.plan.resolve import Plan
from superstep.program.instructions import Wire
from superstep.runtime.device import Device

Group = dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Sharers:
    """The ranks that hold the same parameters as this one.

    Attributes:
        shards: ranks that share out one copy.
        shard: this rank's place among them.
        replica: which copy this rank has a part of.
        fetch: the shards' group for gathering parameters; None where there is one shard.
        reduce: the shards' group for summing gradients; None where there is one shard.
        replicas: the group of the ranks that have the same shard; None where there is one replica.
    """

    shards: int
    shard: int
    replica: int
    fetch: Group | None
    reduce: Group | None
    replicas: Group | None


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The launched ranks, seen from one of them.

    Attributes:
        shape: the degree of each axis.
        rank: this rank's number.
        at: this rank's place.
        device: where this rank computes.
        sharers: for each family of parameters, who holds the same.
        cp: the cp ranks' group; None where cp = 1.
        tp: the tp ranks' group; None where tp = 1.
        ep: the group of ranks that hold all experts together; None where ep = 1.
        sequence: the cp and tp ranks that hold parts of the same sequences; None without experts, or where alone.
        pp: the pp ranks' group; None where pp = 1.
        channels: NCCL only: the group of each channel this rank takes part in.
        ties: for each set of pipeline ranks that share parameters, the group of those at this dp and tp place.
    """

    shape: MeshShape
    rank: int
    at: Coordinate
    device: Device
    sharers: dict[Family, Sharers]
    cp: Group | None
    tp: Group | None
    ep: Group | None
    sequence: Group | None
    pp: Group | None
    channels: dict[tuple[int, int, Wire], Group]
    ties: dict[tuple[int, ...], Group]

    def peer(self, pp: int) -> int:
        """The number of the rank at another pipeline place, everything else equal."""
        return self.shape.rank(Coordinate(pp=pp, dp=self.at.dp, cp=self.at.cp, tp=self.at.tp))

    def destroy(self) -> None:
        """Give the groups back."""
        shared = [g for s in self.sharers.values() for g in (s.fetch, s.reduce, s.replicas)]
        groups = [
            *shared,
            self.cp,
            self.tp,
            self.ep,
            self.sequence,
            self.pp,
            *self.channels.values(),
            *self.ties.values(),
        ]
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


def build_mesh(plan: Plan, rank: int, device: Device, *, timeout: timedelta) -> Mesh:
    """Make the groups. Every rank calls this at the same time with the same plan.

    Args:
        plan: the degrees, whose product is the number of launched ranks, and who shares what.
        rank: this rank's number.
        device: where this rank computes.
        timeout: how long a collective may wait.
    """
    shape, placement, ties, has_experts = plan.mesh, plan.placement, _ties(plan), "experts" in plan.families

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

    at = shape.at(rank)

    def sharers(family: Family) -> Sharers:
        shards, place = shape.shards(family), shape.sharer(family, at)
        return Sharers(
            shards=shards,
            shard=place % shards,
            replica=place // shards,
            fetch=mine(shape.shard_groups(family)),
            reduce=mine(shape.shard_groups(family)),
            replicas=mine(shape.replica_groups(family)),
        )

    # Without experts their groups would only cost connections.
    shared = {family: sharers(family) for family in (FAMILIES if has_experts else FAMILIES[:1])}
    cp, tp, pp = axis("cp"), axis("tp"), axis("pp")
    ep = mine(shape.expert_groups()) if has_experts else None
    sequence = mine(shape.sequence_groups()) if has_experts else None
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
        at=at,
        device=device,
        sharers=shared,
        cp=cp,
        tp=tp,
        ep=ep,
        sequence=sequence,
        pp=pp,
        channels=channels,
        ties=tie_groups,
    )


def _ties(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The sets of pipeline ranks that share parameters: of the embedding and a tied head, where they differ."""
    rank_of = {unit: plan.placement[stage] for stage, units in enumerate(plan.stages) for unit in units}
    readers: dict[int, set[int]] = {}
    for unit, reads in enumerate(plan.params):
        for owner in reads:
            readers.setdefault(owner, set()).add(rank_of[unit])
    return tuple(sorted({tuple(sorted(ranks)) for ranks in readers.values() if len(ranks) > 1}))

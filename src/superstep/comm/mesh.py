"""Mesh: this rank's place, and a process group for each axis and lane.

NCCL and shared memory run the operations of one group in the order of issue, so a group *is* a lane: operations that
must overlap have separate groups. Transfers between pipeline ranks have one group for each channel (from, to, wire)
there; on Gloo one group serves them all, because its messages carry tags. Every rank makes and connects the groups in
the same order, so that no first use waits forever:

    world    shards, replicas of each family    cp tp    pp or channels    ep sequence    ties
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from superstep.comm.backend import Transport, reach
from superstep.comm.device import Device
from superstep.plan.mesh import Coordinate, Family, MeshShape
from superstep.plan.resolution.resolve import Plan
from superstep.program.issue_order import Channel
from superstep.program.p2p_setup import find_tied_places, routes

Group = dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ParameterReplicas:
    """The ranks that hold the same parameters as this one.

    Attributes:
        shards: the number of ranks that shard one copy.
        shard: this rank's place among them.
        replica: which copy this rank has a part of.
        fetch: the shards' group for gathering parameters; None with one shard.
        reduce: the shards' group for summing gradients; None with one shard.
        replicas: the group of the ranks with the same shard; None with one replica.
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
        world: the group of all ranks; None with one.
        sharers: for each family of parameters, the ranks that hold the same.
        cp: the cp ranks' group; None where cp = 1.
        tp: the tp ranks' group; None where tp = 1.
        ep: the group of ranks that hold all experts together; None where ep = 1.
        sequence: the cp and tp ranks that hold parts of the same sequences; None without experts, or where alone.
        pp: the pp ranks' group; None where pp = 1, and where channels have their own groups.
        channels: the group of each channel of this rank; empty with Gloo's calls.
        ties: for each set of pipeline ranks that share parameters, the group of those at this dp and tp place.
    """

    shape: MeshShape
    rank: int
    at: Coordinate
    device: Device
    transport: Transport
    world: Group | None
    sharers: dict[Family, ParameterReplicas]
    cp: Group | None
    tp: Group | None
    ep: Group | None
    sequence: Group | None
    pp: Group | None
    channels: dict[Channel, Group]
    ties: dict[tuple[int, ...], Group]

    def peer(self, pp: int) -> int:
        """The rank at another pipeline place, with all other axes equal."""
        return self.shape.rank(Coordinate(pp=pp, dp=self.at.dp, cp=self.at.cp, tp=self.at.tp))

    def destroy(self) -> None:
        """Destroy the groups."""
        # Families that lie on the ranks of the dense parameters share their groups, which are destroyed once.
        own = [s for f, s in self.sharers.items() if f == "dense" or s is not self.sharers["dense"]]
        shared = [group for s in own for group in (s.fetch, s.reduce, s.replicas)]
        groups = [
            self.world if self.transport.shared is not None else None,
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


def build_mesh(
    plan: Plan, rank: int, device: Device, *, timeout: timedelta, transport: Transport | None = None
) -> Mesh:
    """Make the groups and connect them. Every rank calls this at the same time with the same plan.

    Args:
        plan: the degrees, and which parameters are shared.
        timeout: how long a collective may wait.
        transport: None takes the device's.
    """
    shape, at, has_experts = plan.mesh, plan.mesh.at(rank), "experts" in plan.families
    groups = _Groups(shape, rank, device, timeout, transport or reach(rank, shape.world, device))
    world = groups.world()

    def sharers(family: Family) -> ParameterReplicas:
        shards, place = shape.shards(family), shape.sharer(family, at)
        return ParameterReplicas(
            shards=shards,
            shard=place % shards,
            replica=place // shards,
            fetch=groups.mine(shape.shard_groups(family)),
            reduce=groups.mine(shape.shard_groups(family)),
            replicas=groups.mine(shape.replica_groups(family)),
        )

    # Without experts their groups would only cost connections.
    shared: dict[Family, ParameterReplicas] = {f: sharers(f) for f in plan.families if f in ("dense", "experts")}
    # The others lie on the ranks of the dense parameters.
    shared |= {f: shared["dense"] for f in plan.families if f not in shared}
    has_channels = groups.transport.has_channels
    return Mesh(
        shape=shape,
        rank=rank,
        at=at,
        device=device,
        transport=groups.transport,
        world=world,
        sharers=shared,
        cp=groups.mine(shape.groups("cp")),
        tp=groups.mine(shape.groups("tp")),
        pp=None if has_channels else groups.mine(shape.groups("pp")),
        channels=groups.channels(routes(plan.placement, plan.encoders)) if has_channels else {},
        ep=groups.mine(shape.expert_groups()) if has_experts else None,
        sequence=groups.mine(shape.sequence_groups()) if has_experts else None,
        ties=groups.ties(find_tied_places(plan)),
    )


@dataclass(frozen=True)
class _Groups:
    """Makes groups and connects them, each for all ranks of the world."""

    shape: MeshShape
    rank: int
    device: Device
    timeout: timedelta
    transport: Transport

    def world(self) -> Group | None:
        """The group of all ranks. A library's exists already."""
        if self.transport.shared is not None:
            return self.mine([range(self.shape.world)])
        if dist.group.WORLD is None or dist.group.WORLD.size() == 1:
            return None
        self.transport.connect(dist.group.WORLD, self.device)
        return dist.group.WORLD

    def mine(self, members: Iterable[Sequence[int]]) -> Group | None:
        """Make one group of each list, none of which share a rank; returns this rank's group."""
        group = self._one_of(members)
        if group is not None:
            self.transport.connect(group, self.device)
        return group

    def _one_of(self, members: Iterable[Sequence[int]], *, is_channel: bool = False) -> Group | None:
        group: Group | None = None
        for ranks in members:
            if len(ranks) > 1:
                group = (
                    self.transport.group(ranks, device=self.device, timeout=self.timeout, is_channel=is_channel)
                    or group
                )
        return group

    def channels(self, routes: Iterable[Channel]) -> dict[Channel, Group]:
        """The group of each channel with this rank at one end."""
        groups: dict[Channel, Group] = {}
        for channel in routes:
            source, target, _ = channel
            ends = [(ranks[source], ranks[target]) for ranks in self.shape.groups("pp")]
            group = self._one_of(ends, is_channel=True)
            if group is not None:
                first = next(source for source, target in ends if self.rank in (source, target))
                self.transport.connect_channel(group, self.device, source=first)
                groups[channel] = group
        return groups

    def ties(self, places: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Group]:
        """For each set of pipeline ranks, the group with this rank."""
        made = {p: self.mine([[ranks[each] for each in p] for ranks in self.shape.groups("pp")]) for p in places}
        return {p: group for p, group in made.items() if group is not None}

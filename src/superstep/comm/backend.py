"""Transport: which of Gloo, NCCL and shared memory has the groups, and whose calls are made on them.

                              Gloo's calls                       NCCL's calls
    sums, gathers of buffers  our own messages                   the library's own
    pipeline transfers        one group, told apart by tags      a group for each channel, in order of issue
    first use of a group      connected when it is made          blocks its host until every member has come

Because of the last line NCCL's groups are used once as soon as they are made, in the same order on all ranks. Later, in
a step, first uses would cross (``program.p2p_setup``).

Processes on CPUs of one host share memory (``comm.shared_memory``), which has NCCL's calls and connects nothing. So do
groups over several hosts with equally many ranks on each, with Gloo between the hosts. Other groups use Gloo and its
calls, but each channel is a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from superstep.comm.device import Device
from superstep.comm.objects import gather
from superstep.comm.shared_memory.group import BACKEND as SHARED
from superstep.comm.shared_memory.hierarchical_group import BACKEND as TWO_LEVELS
from superstep.comm.shared_memory.hierarchical_group import GroupLevels
from superstep.comm.shared_memory.region import Region, open_shared_region

CHANNEL_BLOCKS = 4
"""Blocks of a GPU for a channel's transfer (NCCL's ``max_ctas``).

The two ends of a pipeline may use their channels in different orders: one posts receives early that the other sends
late. This ends if the kernels of all channels of a rank fit on the GPU at once, as each holds its blocks until its peer
comes. A rank has at most eight channels, and their 32 blocks fit on any GPU that trains.
"""

Library = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Transport:
    """How ranks reach each other.

    Attributes:
        backend: the library of the groups.
        calls: whose calls are made. Gloo has NCCL's too, and so runs what a GPU would run.
        shared: memory for groups within a host; None where the library's groups are used.
        why: why there is no shared memory where there could be; else empty.
    """

    backend: Library
    calls: Library
    shared: Region | None = None
    why: str = ""

    def describe(self) -> str:
        names = {"gloo": "Gloo", "nccl": "NCCL"}
        if self.shared is None:
            return names[self.backend] + (f" ({self.why})" if self.why else "")
        has_one_host = len(set(self.shared.hosts)) == 1
        return "shared memory" if has_one_host else f"shared memory and {names[self.backend]}"

    @property
    def has_channels(self) -> bool:
        """Whether each channel has its own group."""
        return self.calls == "nccl" or self.shared is not None

    def group(
        self, ranks: Sequence[int], *, device: Device, timeout: timedelta, is_channel: bool = False
    ) -> dist.ProcessGroup | None:
        """Make a group, which every launched rank must do; None where this rank is no member.

        NCCL's group has its communicator when this returns, for which members wait for each other. A channel's is
        limited to ``CHANNEL_BLOCKS``.
        """
        if self.shared is not None and self.shared.is_shared_by(ranks):
            return self._new(ranks, device, timeout, SHARED, self.shared)
        hosts = () if self.shared is None else self.shared.by_host(ranks)
        if not hosts:
            narrow = _narrow(timeout) if is_channel and self.backend == "nccl" else None
            return self._new(ranks, device, timeout, options=narrow)
        # Of each host's ranks two, made by all in one order; a rank has those of its own.
        near = [self._new(here, device, timeout, SHARED, self.shared) for here in hosts for _ in range(2)]
        far, mine = self._new(ranks, device, timeout), [group for group in near if group is not None]
        levels = None if far is None else GroupLevels(near=mine[0], letters=mine[1], far=far)
        return self._new(ranks, device, timeout, TWO_LEVELS, levels)

    def _new(
        self,
        ranks: Sequence[int],
        device: Device,
        timeout: timedelta,
        own: str | None = None,
        options: Region | GroupLevels | Any = None,  # noqa: ANN401 - NCCL's have no type in a torch without it
    ) -> dist.ProcessGroup | None:
        """The library's group, or one of our own with NCCL's calls."""
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=own or self.backend,
            pg_options=options,
            group_desc="nccl" if own else self.calls,
            device_id=device.torch if self.backend == "nccl" else None,
        )
        return group if isinstance(group, dist.ProcessGroup) else None

    def connect(self, group: dist.ProcessGroup, device: Device) -> None:
        """Use a group for the first time; its members do so together."""
        if self.calls == "nccl":
            dist.all_reduce(torch.zeros(1, device=device.torch), group=group)

    def connect_channel(self, group: dist.ProcessGroup, device: Device, *, source: int) -> None:
        """Send something small over a channel, from its rank ``source``; both ends do so together."""
        if self.calls != "nccl":
            return
        tiny, peer = torch.zeros(1, device=device.torch), 1 - group.rank()
        if dist.get_global_rank(group, group.rank()) == source:
            dist.send(tiny, group=group, group_dst=peer)
        else:
            dist.recv(tiny, group=group, group_src=peer)


def _narrow(timeout: timedelta) -> Any:  # noqa: ANN401 - NCCL's options have no type in a torch without it
    """Options of a communicator with few blocks."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = CHANNEL_BLOCKS
    return options


GLOO = Transport(backend="gloo", calls="gloo")
NCCL = Transport(backend="nccl", calls="nccl")


def reach(rank: int, world: int, device: Device) -> Transport:
    """The transport between devices of this kind. Every launched rank calls this together."""
    if device.backend != "gloo":
        return NCCL
    if world == 1:
        return GLOO
    region, why = open_shared_region(rank, world, gather)
    return replace(GLOO, shared=region, why=why)


def has_gloos_calls(group: dist.ProcessGroup) -> bool:
    """Whether Gloo's calls are made on the group: by its transport, else by its library."""
    return (group.group_desc if group.group_desc in ("gloo", "nccl") else dist.get_backend(group)) == "gloo"

"""The seam between Gloo and NCCL: which library has the groups, and whose calls are made on them.

                              Gloo's calls                       NCCL's calls
    sums, gathers of buffers  messages of our own                the library's own
    pipeline transfers        one group, told apart by tags      a group for each channel, in order of issue
    first use of a group      connected when it is made          keeps its host until every member has come to it

The last line is why every group is used once as soon as it is made: in one order on all ranks, so that none waits for
one that waits for it. Later, in a step, first uses would cross (``program.rendezvous``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from superstep.runtime.device import Device

Library = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Transport:
    """How ranks reach each other.

    Attributes:
        backend: the library that the groups belong to.
        calls: whose calls are made on them. Gloo knows NCCL's too, and so runs what a GPU would run.
    """

    backend: Library
    calls: Library

    @property
    def has_channels(self) -> bool:
        """Whether each channel has a group of its own."""
        return self.calls == "nccl"

    def group(self, ranks: Sequence[int], *, device: Device, timeout: timedelta) -> dist.ProcessGroup | None:
        """Make a group, which every launched rank must do; None where this rank is no member.

        NCCL's has its communicator when this returns, for which members wait for each other.
        """
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=self.backend,
            group_desc=self.calls,
            device_id=device.torch if self.backend == "nccl" else None,
        )
        return group if isinstance(group, dist.ProcessGroup) else None

    def connect(self, group: dist.ProcessGroup, device: Device) -> None:
        """Use a group for the first time; its members do so together."""
        if self.calls == "nccl":
            dist.all_reduce(torch.zeros(1, device=device.torch), group=group)

    def connect_channel(self, group: dist.ProcessGroup, device: Device, *, source: int) -> None:
        """Send something small over a channel, from its rank ``source``; both ends do so together."""
        tiny, peer = torch.zeros(1, device=device.torch), 1 - group.rank()
        if dist.get_global_rank(group, group.rank()) == source:
            dist.send(tiny, group=group, group_dst=peer)
        else:
            dist.recv(tiny, group=group, group_src=peer)


GLOO = Transport(backend="gloo", calls="gloo")
NCCL = Transport(backend="nccl", calls="nccl")


def transport_of(device: Device) -> Transport:
    """The transport between devices of this kind."""
    return GLOO if device.backend == "gloo" else NCCL


def has_gloos_calls(group: dist.ProcessGroup) -> bool:
    """Whether Gloo's calls are made on the group: as the transport says that made it, else as its library is."""
    return (group.group_desc if group.group_desc in ("gloo", "nccl") else dist.get_backend(group)) == "gloo"

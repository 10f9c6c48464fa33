"""Where ranks meet: those of one host in a file, those of several in a store that the first host's launcher keeps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from superstep.comm.device import Device

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks of several hosts meet, and which of them are launched here.

    Attributes:
        store: the address and port of a store that lives as long as they do.
        first: the number of the first rank of this host.
        world: how many ranks there are on all hosts.
        host: what this one is called in what is told of its ranks.
    """

    store: tuple[str, int]
    first: int
    world: int
    host: str


@dataclass(frozen=True, slots=True)
class RankSlot:
    """A rank's number, how many ranks there are, and where they meet: a file's URL, or a store's address and port.

    Attributes:
        is_first: whether it is the first of those that its launcher has, who is told what it returns.
    """

    rank: int
    world: int
    file: str
    store: tuple[str, int] | None
    is_first: bool

    def take(self, device: Device) -> None:
        """Meet the others."""
        options: dict[str, Any] = {"init_method": self.file}
        if self.store is not None:
            address, port = self.store
            store = dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]
            options = {"store": store}
        options["device_id"] = device.of_groups
        dist.init_process_group(device.backend, rank=self.rank, world_size=self.world, timeout=TIMEOUT, **options)

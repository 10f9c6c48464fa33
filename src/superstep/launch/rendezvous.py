"""Where ranks meet: on one host in a file, on several in a store of the first host's launcher."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from superstep.comm.device import Device

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of several hosts meet, and which of them are launched here.

    Attributes:
        store: address and port; the store outlives the ranks.
        first: this host's first rank.
        world: the number of ranks on all hosts.
        host: this host's name in messages.
    """

    store: tuple[str, int]
    first: int
    world: int
    host: str


@dataclass(frozen=True, slots=True)
class RankSlot:
    """A rank's number, the number of ranks, and where they meet: a file's URL, or a store's address and port.
    ``is_first``: whether it is its launcher's first rank, which returns the value.
    """

    rank: int
    world: int
    file: str
    store: tuple[str, int] | None
    is_first: bool

    def take(self, device: Device) -> None:
        """Join the process group."""
        options: dict[str, Any] = {"init_method": self.file}
        if self.store is not None:
            address, port = self.store
            store = dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]
            options = {"store": store}
        options["device_id"] = device.of_groups
        dist.init_process_group(device.backend, rank=self.rank, world_size=self.world, timeout=TIMEOUT, **options)

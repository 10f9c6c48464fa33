"""Where ranks meet: on one host in a file, on several in a store of the first host's launcher.

Worlds of one launch have a process group each, and share a store: ranks of one find what ranks of another publish.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from superstep.comm.device import Device

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class LaunchStore:
    """Values that the ranks of all worlds of a launch share.

    Attributes:
        store: keeps them.
        address: of this host, for the other ranks.
        secret: that all ranks know; None where whoever reads the store is one of them.
    """

    store: dist.Store  # type: ignore[name-defined]
    address: str
    secret: bytes | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> LaunchStore:
        """The store of a launch on one host, in a folder of this user."""
        return cls(dist.FileStore(str(folder / "values")), "127.0.0.1")  # type: ignore[attr-defined]

    def put(self, name: str, value: bytes) -> None:
        """Publish a value."""
        self.store.set(name, value)

    def get(self, name: str) -> bytes | None:
        """A value; None where nobody has published it yet."""
        return bytes(self.store.get(name)) if self.store.check([name]) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of several hosts meet, and which of them are launched here.

    Attributes:
        store: address and port; the store outlives the ranks.
        first: this host's first rank.
        world: the number of ranks on all hosts.
        host: this host's name in messages.
        address: of this host.
        secret: of the run.
    """

    store: tuple[str, int]
    first: int
    world: int
    host: str
    address: str
    secret: bytes

    def open(self) -> dist.Store:  # type: ignore[name-defined]
        """The store, from one of the ranks."""
        return dist.TCPStore(*self.store, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class RankSlot:
    """A rank's number, the number of ranks, and where they meet: a file, or the store of several hosts.

    Attributes:
        name: of its world.
        is_first: whether it is its launcher's first rank, which returns the value.
    """

    rank: int
    world: int
    name: str
    file: Path
    meeting: Rendezvous | None
    is_first: bool

    def take(self, device: Device) -> LaunchStore:
        """Join the process group; the store of the launch."""
        if self.meeting is None:
            shared = LaunchStore.of_folder(self.file.parent)
            options: dict[str, Any] = {"init_method": f"file://{self.file}"}
        else:
            shared = LaunchStore(self.meeting.open(), self.meeting.address, self.meeting.secret)
            options = {"store": dist.PrefixStore(self.name, shared.store)}  # type: ignore[attr-defined]
        options["device_id"] = device.of_groups
        dist.init_process_group(device.backend, rank=self.rank, world_size=self.world, timeout=TIMEOUT, **options)
        return shared

"""Python objects between all ranks: each one's value, and a barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from superstep.comm.device import Device

T = TypeVar("T")


def barrier(device: Device, group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank, or every rank of a group; on this rank's GPU, where NCCL would guess another."""
    dist.barrier(group, device_ids=None if device.kind == "cpu" else [device.index])


def world_group() -> dist.ProcessGroup | None:
    """The group of all ranks; None with one."""
    group = dist.group.WORLD
    return None if group is None or group.size() == 1 else group


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank; for small values."""
    group = world_group()
    if group is None:
        return [value]
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, value)
    return objects


@dataclass(frozen=True, slots=True)
class RankPeers:
    """The launched ranks, as ``state`` wants them."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        return gather(value)

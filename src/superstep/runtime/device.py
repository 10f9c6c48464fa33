"""The seam between CPU and GPU: the few things that differ, and nothing else."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch


@dataclass(frozen=True, slots=True)
class Device:
    """Where a rank computes.

    Attributes:
        kind: cpu or cuda.
        index: the GPU's number on this host; 0 for a CPU.
    """

    kind: Literal["cpu", "cuda"]
    index: int = 0

    @property
    def torch(self) -> torch.device:
        """The torch device."""
        return torch.device(self.kind) if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """The torch.distributed backend that serves it."""
        return "gloo" if self.kind == "cpu" else "nccl"

    @property
    def name(self) -> str:
        """The device's name, as the vendor writes it."""
        return "CPU" if self.kind == "cpu" else torch.cuda.get_device_name(self.torch)

    def synchronize(self) -> None:
        """Wait until everything issued so far has run."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch)

    def memory_bytes(self) -> int:
        """Memory in use: the process's resident set on a CPU, the allocator's peak on a GPU."""
        if self.kind == "cuda":
            return int(torch.cuda.max_memory_allocated(self.torch))
        return int(psutil.Process().memory_info().rss)

    def peak_bytes(self) -> int:
        """The most memory that was ever in use: the process's largest resident set, or the allocator's peak."""
        if self.kind == "cuda":
            return self.memory_bytes()
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def total_bytes(self, ranks: int) -> int:
        """Memory that each of so many ranks of this host may use: its GPU's, or its share of what the host has left."""
        if self.kind == "cuda":
            return int(torch.cuda.get_device_properties(self.torch).total_memory)
        return min(int(psutil.virtual_memory().available), _cgroup_bytes()) // ranks


def _cgroup_bytes() -> int:
    """What the control group of this process has left."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="utf-8").strip()
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        return sys.maxsize if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return sys.maxsize


def pick(local_rank: int) -> Device:
    """The device of a rank: its own GPU where there are any, else the CPU."""
    count = torch.cuda.device_count()
    if count == 0:
        return Device("cpu")
    device = Device("cuda", local_rank % count)
    torch.cuda.set_device(device.torch)
    return device

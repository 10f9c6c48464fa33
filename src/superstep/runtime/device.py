"""The seam between CPU and GPU: the few things that differ, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
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


def pick(local_rank: int) -> Device:
    """The device of a rank: its own GPU where there are any, else the CPU."""
    count = torch.cuda.device_count()
    if count == 0:
        return Device("cpu")
    device = Device("cuda", local_rank % count)
    torch.cuda.set_device(device.torch)
    return device

"""The seam between CPU and GPU: the few things that differ, and nothing else."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import device as TorchDevice  # within ours the name torch is a property

from superstep.errors import ConfigError
from superstep.monitor.gpu_progress import StreamMarks
from superstep.plan.config import DeviceKind


@dataclass(frozen=True, slots=True)
class Device:
    """Where a rank computes.

    Attributes:
        kind: cpu or cuda.
        index: the GPU's number on this host; 0 for a CPU.
    """

    kind: DeviceKind
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

    def make_current(self) -> None:
        """Make it the GPU of this thread. A thread begins with GPU 0, and what it asks of CUDA first would give this
        process a context there, whose memory the rank of GPU 0 lacks.
        """
        if self.kind == "cuda":
            torch.cuda.set_device(self.torch)

    def pin(self, address: int, size_bytes: int) -> str:
        """Have the GPU copy straight to memory of the host's; why the driver refuses, empty where it does not.

        What it refuses is copied to all the same, by way of a buffer of the driver's. A thread of its own asks: CUDA
        keeps an error for the thread that met it, whose next launch of a kernel would raise it.
        """

        def register() -> str:
            self.make_current()
            code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
            return str(torch.cuda.CudaError(code)) if code else ""

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(register).result()

    @property
    def of_groups(self) -> TorchDevice | None:
        """What process groups are bound to, so that NCCL guesses no GPU; None of a CPU, to which Gloo binds nothing."""
        return self.torch if self.kind == "cuda" else None

    def stream_marks(self) -> StreamMarks | None:
        """What tells how far the GPU has come; None of a CPU, which is where its host is."""
        return StreamMarks(torch.cuda.Event, self.make_current) if self.kind == "cuda" else None

    def synchronize(self) -> None:
        """Wait until everything issued so far has run."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch)

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """Within the block a GPU's kernels sum in one order, at a price; on a CPU they do always.

        The backward pass of fused attention adds with atomics otherwise, in whatever order the blocks come. Products
        need CUBLAS_WORKSPACE_CONFIG as well, which is read when the process first multiplies; torch says so in an
        error of its own where it is missing.
        """
        if self.kind == "cpu":
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # noqa: FBT003 - torch's own signature
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

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

    def count_from_here(self) -> int:
        """Memory in use now. On a GPU ``peak_bytes`` counts from here on, and forgets what was measured before."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch)
            return int(torch.cuda.memory_allocated(self.torch))
        return self.memory_bytes()

    def capacity_bytes(self) -> int:
        """Memory that is built in, whoever uses it."""
        if self.kind == "cuda":
            return int(torch.cuda.get_device_properties(self.torch).total_memory)
        return int(psutil.virtual_memory().total)

    def free_bytes(self, ranks: int) -> int:
        """Memory that each of so many ranks of this host may use: what its GPU has left, or its share of the host's."""
        if self.kind == "cuda":
            free, _ = torch.cuda.mem_get_info(self.torch)
            # What the allocator keeps without a use for it is this process's as well.
            return int(free + torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch))
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


def gpus() -> int:
    """GPUs that this process may use. To count them gives it no context, which would take memory on each."""
    return torch.cuda.device_count()


def choose(wanted: DeviceKind | None, ranks: int = 1) -> DeviceKind:
    """What so many ranks of this host compute on: what ``plan.device`` asks for, else GPUs where there are any.

    Raises:
        ConfigError: there are not as many GPUs. NCCL refuses two ranks on one.
    """
    count = gpus()
    if wanted == "cpu" or (wanted is None and count == 0):
        return "cpu"
    if count == 0:
        raise ConfigError("plan.device = 'cuda': torch finds no GPU on this host; leave it out, or set it to 'cpu'.")
    if ranks > count:
        few = "1 GPU" if count == 1 else f"{count} GPUs"
        raise ConfigError(
            f"plan.device: {ranks} ranks on a host with {few}, and NCCL needs one for each rank; launch at most "
            f"{count} (the product of plan.pp, dp, cp and tp), or compute on the CPU: plan.device = 'cpu'."
        )
    return "cuda"


def pick(local_rank: int, wanted: DeviceKind | None = None) -> Device:
    """The device of a rank by its number on its host: a GPU of its own, or the CPU.

    Where the number on the host is not known the rank's number serves as well: hosts are filled one after the other.
    """
    if choose(wanted) == "cpu":
        return Device("cpu")
    device = Device("cuda", local_rank % gpus())
    device.make_current()
    return device

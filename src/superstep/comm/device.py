"""Device: the few things that differ between CPU and GPU."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import device as TorchDevice  # within ours the name torch is a property

from superstep.errors import ConfigError
from superstep.monitor.gpu_progress import StreamMarks
from superstep.plan.config import DeviceKind


@dataclass(frozen=True, slots=True)
class Device:
    """Where a rank computes. ``index``: the GPU's number on this host; 0 for a CPU."""

    kind: DeviceKind
    index: int = 0

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind) if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """The device's torch.distributed backend."""
        return "gloo" if self.kind == "cpu" else "nccl"

    @property
    def name(self) -> str:
        """The device's name, as the vendor writes it."""
        return "CPU" if self.kind == "cpu" else torch.cuda.get_device_name(self.torch)

    def make_current(self) -> None:
        """Make it the GPU of this thread. A thread begins with GPU 0, and its first CUDA call would make a context
        there, and take memory from the rank of GPU 0.
        """
        if self.kind == "cuda":
            torch.cuda.set_device(self.torch)
            # Convolutions in fp32, as products are: cuDNN would round their inputs to 10 bits of mantissa.
            torch.backends.cudnn.allow_tf32 = False

    def pin(self, address: int, size_bytes: int) -> str:
        """Pin host memory so that the GPU copies straight to it; returns why the driver refuses, empty where it does
        not.

        Refused memory is still copied to, through a buffer of the driver's.
        """
        return self._on_own_thread(lambda runtime: runtime.cudaHostRegister(address, size_bytes, 0))

    def unpin(self, address: int) -> str:
        """Give up the pinning of memory from ``address`` on, which must come before the memory is freed; returns why
        the driver refuses, empty where it does not.
        """
        return self._on_own_thread(lambda runtime: runtime.cudaHostUnregister(address))

    def _on_own_thread(self, call: Callable[[Any], Any]) -> str:
        """Call CUDA's runtime, and return its error, empty without one. CUDA keeps an error for the thread that met it,
        whose next kernel launch would raise it: so the thread ends with the call.
        """

        def run() -> str:
            self.make_current()
            code = int(call(torch.cuda.cudart()))
            return str(torch.cuda.CudaError(code)) if code else ""

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()

    @property
    def of_groups(self) -> TorchDevice | None:
        """The device that process groups are bound to, so that NCCL does not guess; None for a CPU."""
        return self.torch if self.kind == "cuda" else None

    def stream_marks(self) -> StreamMarks | None:
        """Marks for the GPU's progress; None for a CPU, which is where its host is."""
        return StreamMarks(torch.cuda.Event, self.make_current) if self.kind == "cuda" else None

    def synchronize(self) -> None:
        """Wait until everything issued so far has run."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch)

    def keep_order(self) -> None:
        """What ``deterministic`` does, for the rest of the process."""
        if self.kind == "cuda":
            torch.use_deterministic_algorithms(True)  # noqa: FBT003 - torch's own signature

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """Within the block a GPU's kernels sum in a fixed order, at a cost; on a CPU they always do.

        Otherwise the backward pass of fused attention adds with atomics, in any order. Products also need
        CUBLAS_WORKSPACE_CONFIG, which is read at the process's first product; torch raises an error where it is
        missing.
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
        """The most memory ever in use: the process's largest resident set, or the allocator's peak."""
        if self.kind == "cuda":
            return self.memory_bytes()
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def count_from_here(self) -> int:
        """Memory in use now. On a GPU it resets ``peak_bytes``."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch)
            return int(torch.cuda.memory_allocated(self.torch))
        return self.memory_bytes()

    def capacity_bytes(self) -> int:
        """Installed memory."""
        if self.kind == "cuda":
            return int(torch.cuda.get_device_properties(self.torch).total_memory)
        return int(psutil.virtual_memory().total)

    def free_bytes(self, ranks: int) -> int:
        """Memory for each of ``ranks`` ranks of this host: what is free on its GPU, or its share of the host's."""
        if self.kind == "cuda":
            free, _ = torch.cuda.mem_get_info(self.torch)
            # What the allocator keeps without a use for it is this process's as well.
            return int(free + torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch))
        return min(int(psutil.virtual_memory().available), _cgroup_bytes()) // ranks


def _cgroup_bytes() -> int:
    """What is left in this process's control group."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="utf-8").strip()
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        return sys.maxsize if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return sys.maxsize


def gpus() -> int:
    """GPUs that this process may use; counting them makes no context, which would take memory on each."""
    return torch.cuda.device_count()


def choose(wanted: DeviceKind | None, ranks: int = 1) -> DeviceKind:
    """The device kind for ``ranks`` ranks of this host: that of ``plan.device``, else GPUs where there are any. Raises
    ConfigError where there are fewer GPUs than ranks. NCCL refuses two ranks on one.
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

    The global rank works too where the number on the host is unknown: hosts are filled one after the other.
    """
    if choose(wanted) == "cpu":
        return Device("cpu")
    device = Device("cuda", local_rank % gpus())
    device.make_current()
    return device

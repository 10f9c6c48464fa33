"""A GPU's memory and properties in ``torch.cuda``, which reads both from ``torch._C``."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

CAPABILITY = (9, 0)
SHARED_MEMORY_BYTES = 232_448
"""Of a block on sm_90 (CUDA C++ programming guide, table of technical specifications), as the following."""
PROPERTIES = {
    "name": "strict",
    "major": CAPABILITY[0],
    "minor": CAPABILITY[1],
    "multi_processor_count": 132,
    "warp_size": 32,
    "max_threads_per_block": 1024,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65_536,
    "shared_memory_per_block": 49_152,
    "shared_memory_per_block_optin": SHARED_MEMORY_BYTES,
    "shared_memory_per_multiprocessor": 233_472,
    "L2_cache_size": 50 << 20,
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "gcnArchName": "",
}
SIZES = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes")
COUNTS = ("allocation", "active", "segment", "inactive_split")
NONE = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}


class MemoryCalls:
    """Calls of ``torch._C`` about memory.

    Args:
        device: the compiled module.
    """

    def __init__(self, device: ModuleType) -> None:
        self._device = device

    def install(self) -> None:
        """Install them where torch's own functions read them."""
        calls = {
            "_cuda_memoryStats": self.statistics,
            "_cuda_resetPeakMemoryStats": self._device.reset_peak,
            "_cuda_resetAccumulatedMemoryStats": self._device.reset_accumulated,
            "_cuda_emptyCache": self._device.empty_cache,
            "_cuda_ipc_collect": lambda: None,
            "_cuda_getAllocatorBackend": lambda: "native",
        }
        for name, call in calls.items():
            setattr(torch._C, name, call)

    def statistics(self, index: int) -> dict[str, Any]:
        """As ``THCPModule_memoryStats`` in torch/csrc/cuda/Module.cpp. All blocks belong to the large pool; a block is
        a segment of its own, and so none is split.
        """
        of = self._device.statistics(index)
        kinds = dict.fromkeys((*SIZES, *COUNTS), NONE)
        kinds |= dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), of["allocated_bytes"])
        kinds |= dict.fromkeys(("allocation", "active"), of["allocations"])
        kinds |= {"reserved_bytes": of["reserved_bytes"], "segment": of["segments"]}
        return {
            **{name: {"all": one, "large_pool": one, "small_pool": NONE} for name, one in kinds.items()},
            "oversize_allocations": NONE,
            "oversize_segments": NONE,
            "num_alloc_retries": of["retries"],
            "num_ooms": of["ooms"],
            "num_sync_all_streams": of["retries"],
            "num_device_alloc": of["segments"]["allocated"],
            "num_device_free": of["segments"]["freed"],
            "max_split_size": -1,
        }

    def free_and_total(self, index: int) -> tuple[int, int]:
        """Unreserved bytes of the device, and its total."""
        total: int = self._device.device_bytes()
        return total - self._device.statistics(index)["reserved_bytes"]["current"], total

    def properties(self, index: int) -> SimpleNamespace:
        """``torch.cuda.get_device_properties``."""
        return SimpleNamespace(**PROPERTIES, total_memory=self._device.device_bytes(), pci_bus_id=index)

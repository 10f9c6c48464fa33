"""``torch.cuda.cudart()`` on the strict device: host memory that is registered with a GPU.

Source of the rules: the reference of CUDA's runtime, under cudaHostRegister and cudaGetLastError. Errors are returned,
and stay with the thread until its next kernel launch, which raises them (c10/cuda/CUDAException.h).
"""

from __future__ import annotations

from types import ModuleType
from typing import Self

import torch

IS_REGISTERED, IS_NOT_REGISTERED = 712, 713
TEXTS = {
    IS_REGISTERED: "part or all of the requested memory range is already mapped",
    IS_NOT_REGISTERED: "pointer does not correspond to a registered memory region",
}
"""Texts of CUDA's error codes."""


class CudaError(RuntimeError):
    """``torch.cuda.CudaError``."""

    def __init__(self, code: int) -> None:
        super().__init__(f"{TEXTS[code]} ({code})")


class Cudart:
    """Calls of CUDA's runtime.

    Args:
        device: the compiled module.
    """

    def __init__(self, device: ModuleType) -> None:
        self._device = device

    def itself(self) -> Self:
        """``torch.cuda.cudart``."""
        return self

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's own name
        """Register host memory for direct copies by GPUs; 0, or an error code."""
        self._device.make_context(torch.accelerator.current_device_index())
        return 0 if self._device.register_memory(address, size_bytes) else self._refuse(IS_REGISTERED)

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's own name
        """Unregister host memory; 0, or an error code."""
        return 0 if self._device.unregister_memory(address) else self._refuse(IS_NOT_REGISTERED)

    def _refuse(self, code: int) -> int:
        self._device.set_last_error(TEXTS[code])
        return code

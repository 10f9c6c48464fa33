"""From the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """The host's numbers on a device. A GPU is not waited for: from pinned memory a copy goes on after the call, where
    any other one waits for all that the GPU was given before (aten/src/ATen/native/cuda/Copy.cu).
    """
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)

"""Copies from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """The host's numbers on a device, without waiting for a GPU: a copy from pinned memory is asynchronous, while any
    other waits for all earlier work of the GPU (aten/src/ATen/native/cuda/Copy.cu).
    """
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)

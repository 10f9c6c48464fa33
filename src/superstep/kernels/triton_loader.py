"""The kernels for GPUs, imported at first use: CPU runs neither need nor import Triton."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch

LEAST = (8, 0)
"""The least compute capability with products of bf16."""


@cache
def missing(device: torch.device) -> str:
    """Why a GPU cannot have them, in a line; empty where it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    has = torch.cuda.get_device_capability(device)
    return "" if has >= LEAST else f"compute capability {has[0]}.{has[1]} is below {LEAST[0]}.{LEAST[1]}"


def module(name: str) -> ModuleType:
    return importlib.import_module(f"superstep.kernels.gpu.{name}")

"""The kernels for GPUs, imported where one of them computes: nothing that a CPU runs needs Triton, or waits for it."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch

LEAST = (8, 0)
"""The compute capability from which on GPUs have products of bf16."""


@cache
def missing(device: torch.device) -> str:
    """Why a GPU cannot have them, in a line; empty where it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    has = torch.cuda.get_device_capability(device)
    return "" if has >= LEAST else f"compute capability {has[0]}.{has[1]} is below {LEAST[0]}.{LEAST[1]}"


def module(name: str) -> ModuleType:
    """A file of ``kernels/gpu``."""
    return importlib.import_module(f"superstep.kernels.gpu.{name}")

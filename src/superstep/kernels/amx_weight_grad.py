"""A weight's gradient from two bf16 matrices, on a CPU with AMX: fp32 throughout, straight into its buffer.

Torch's product would be rounded to bf16, then widened and added: for 1,024 tokens that is a third of the time.

    T  tokens    O  outputs    I  inputs
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from superstep.kernels import cpu_library

TILES = 32
"""Outputs and inputs are a multiple of this."""

_REAL = (Tensor, nn.Parameter)
"""Real tensors; a trace's fake tensors have another type."""


def reference(into_OI: Tensor, grad_OT: Tensor, x_TI: Tensor, scale: float = 1.0) -> None:
    """into += scale · grad · x."""
    into_OI += scale * (grad_OT.to(into_OI.dtype) @ x_TI.to(into_OI.dtype))


@cache
def has_tiles() -> bool:
    """Whether this processor multiplies tiles of bf16, and the system allows it to this process."""
    library = cpu_library.compile_library().library
    return library is not None and bool(library.superstep_may_use_tiles())


def takes(into_OI: Tensor, grad_OT: Tensor, x_TI: Tensor) -> bool:
    """Whether the kernel computes it: gradient and input have a token in each row."""
    return (
        into_OI.dtype == torch.float32
        and grad_OT.dtype == x_TI.dtype == torch.bfloat16
        and all(type(x) in _REAL and x.device.type == "cpu" for x in (into_OI, grad_OT, x_TI))
        and into_OI.stride(1) == grad_OT.stride(0) == x_TI.stride(1) == 1
        and all(size % TILES == 0 for size in into_OI.shape)
        and into_OI.numel() > 0
        and has_tiles()
    )


def add(into_OI: Tensor, grad_OT: Tensor, x_TI: Tensor, scale: float = 1.0) -> None:
    """``reference`` by the kernel; see ``takes``. The product is summed by itself and added once."""
    _add(into_OI, grad_OT, x_TI, float(scale))


@torch.library.custom_op("superstep::add_outer", mutates_args=("into_OI",))
def _add(into_OI: Tensor, grad_OT: Tensor, x_TI: Tensor, scale: float) -> None:
    """A torch operation, so that traces of a step show it."""
    tables = into_OI, into_OI.stride(0), grad_OT, grad_OT.stride(1), x_TI, x_TI.stride(0)
    cpu_library.run("add_outer", *tables, len(x_TI), *into_OI.shape, scale)

"""A weight's gradient from two tables of bf16, on a CPU with AMX: fp32 all the way, straight into its buffer.

Torch's product would be rounded to bf16, and what is rounded then be made wide and added: of 1,024 tokens that is a
third of what a weight's gradient takes.

    T  tokens    O  outputs    I  inputs
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from superstep.kernels import cpu_library

TILES = 32
"""Of which outputs and inputs are a multiple."""

_REAL = (Tensor, nn.Parameter)
"""What has numbers: a rehearsal's tensors are of another type."""


def reference(into_OI: Tensor, grad_OT: Tensor, x_TI: Tensor, scale: float = 1.0) -> None:
    """into += scale · grad · x."""
    into_OI += scale * (grad_OT.to(into_OI.dtype) @ x_TI.to(into_OI.dtype))


@cache
def has_tiles() -> bool:
    """Whether this processor multiplies tiles of bf16, and the system lets this process do so."""
    library = cpu_library.compile_library().library
    return library is not None and bool(library.superstep_may_use_tiles())


def takes(into_OI: Tensor, grad_OT: Tensor, x_TI: Tensor) -> bool:
    """Whether the kernel computes it: of a gradient that lies a token to a row, as does its input."""
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
    """As ``reference``, by the kernel; ``takes`` says of what. The product is summed by itself and added once."""
    _add(into_OI, grad_OT, x_TI, float(scale))


@torch.library.custom_op("superstep::add_outer", mutates_args=("into_OI",))
def _add(into_OI: Tensor, grad_OT: Tensor, x_TI: Tensor, scale: float) -> None:
    """An operation of its own, so that who looks at a step sees it."""
    tables = into_OI, into_OI.stride(0), grad_OT, grad_OT.stride(1), x_TI, x_TI.stride(0)
    cpu_library.run("add_outer", *tables, len(x_TI), *into_OI.shape, scale)

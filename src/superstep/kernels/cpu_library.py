"""The library of ``cpu/fused.cpp``: a step's work between products, compiled once."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from superstep.kernels import compile_cpp
from superstep.kernels.attention import FLAGS
from superstep.kernels.compile_cpp import BuildResult

HEADERS = (
    *("attention.h", "packed.h", "cross_entropy.h", "grid.h", "grid_product.h", "norm.h", "numbers.h", "outer.h"),
    *("paired.h", "philox.h", "product.h", "rope.h", "swiglu.h", "tiles.h", "vector.h"),
)
SOURCES = tuple(Path(__file__).parent / "cpu" / name for name in ("fused.cpp", *HEADERS))

LANES = 16
"""Numbers of a register: vectorised rows are a multiple of this."""

DTYPES = (torch.float32, torch.bfloat16)


@cache
def compile_library() -> BuildResult:
    return compile_cpp.build(SOURCES, FLAGS, compile_cpp.folder_of(SOURCES[0]))


def is_compiled() -> bool:
    """Whether the library is available."""
    return compile_library().library is not None


def takes(*tensors: Tensor) -> bool:
    """Whether the library computes with such tensors."""
    return all(x.device.type == "cpu" and x.dtype == tensors[0].dtype in DTYPES for x in tensors)


Argument = Tensor | int | float | None


def run(name: str, *arguments: Argument) -> None:
    """Call a function; tensors are passed by address, and the caller keeps them alive."""
    library = compile_library().library
    assert library is not None, "it was chosen because it is there"
    function: ctypes._NamedFuncPointer = getattr(library, f"superstep_{name}")
    function.restype = None
    function(*map(_to_c, arguments), c_int64(torch.get_num_threads()))


def _to_c(argument: Argument) -> c_void_p | c_int64 | c_float:
    match argument:
        case None:
            return c_void_p(None)
        case Tensor():
            return c_void_p(argument.data_ptr())
        case float():
            return c_float(argument)
        case _:
            return c_int64(argument)

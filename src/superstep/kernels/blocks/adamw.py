"""AdamW of moments in 8 bits, by C++ or Triton: a block is decoded, updated and encoded in one pass.

The bits are those of ``dynamic_map``'s ``decode`` and ``encode`` around the operations of ``numerics.update_rules``, in
their order. On a GPU torch divides by a number that it has on the host by multiplying with its inverse, which rounds
otherwise: the Triton form divides, as C++ and torch on a CPU do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from superstep.kernels import compile_cpp, triton_loader
from superstep.kernels.blocks.dynamic_map import SIZE, DynamicMap, dynamic_map
from superstep.kernels.compile_cpp import BuildResult

SOURCES = tuple(Path(__file__).parents[1] / "cpu" / name for name in ("blocks.cpp", "vector.h"))
FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fopenmp", "-std=c++20", "-fPIC", "-shared"),
)
LEVELS = 16
"""Entries of each table of a map, for kernels; the last ones are unused."""


@dataclass(frozen=True, slots=True)
class BlockMoment:
    """A moment in 8 bits: uint8 codes [N], and fp32 scales [N / 256]."""

    codes: Tensor
    scales: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Both of them."""
        return self.codes, self.scales


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWNumbers:
    """The numbers of an update: w = keep · w - rate · m / (root_by · √v + eps), of gradients divided by ``scale``."""

    scale: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    root_by: float
    eps: float
    keep: float
    rate: float


@cache
def compile_library() -> BuildResult:
    return compile_cpp.build(SOURCES, FLAGS, compile_cpp.folder_of(SOURCES[0]))


def has_kernel(device: torch.device) -> bool:
    """Whether a kernel updates such moments on this device."""
    if device.type == "cpu":
        return compile_library().library is not None
    return device.type == "cuda" and not triton_loader.missing(device)


def update_blocks(param: Tensor, grad: Tensor, moments: Sequence[BlockMoment], numbers: AdamWNumbers) -> None:
    """Update a parameter and its two moments in place.

    Args:
        param, grad: fp32 [N], contiguous.
        moments: of N numbers, the first one signed.
        numbers: of the update.
    """
    assert param.numel() % SIZE == 0, "blocks are whole"
    first, second = moments
    if param.device.type != "cpu":
        triton_loader.module("blocks").update_blocks(param, grad, first, second, numbers)
        return
    library = compile_library().library
    assert library is not None, "it was chosen because it is there"
    values = torch.tensor(astuple(numbers), dtype=torch.float32)
    tensors = [param, grad]
    for moment, is_signed in ((first, True), (second, False)):
        tensors += [moment.codes, moment.scales, pack(dynamic_map(is_signed=is_signed))]
    assert all(tensor.is_contiguous() for tensor in tensors)
    function: ctypes._NamedFuncPointer = library.superstep_update_blocks
    function.restype = None
    addresses = [c_void_p(tensor.data_ptr()) for tensor in tensors]
    blocks, threads = c_int64(param.numel() // SIZE), c_int64(torch.get_num_threads())
    function(*addresses, blocks, c_void_p(values.data_ptr()), threads)


def pack(of: DynamicMap) -> Tensor:
    """A map's tables for kernels: fp32 [6, 16]."""
    return _pack_tables(of.is_signed)


@cache
def _pack_tables(is_signed: bool) -> Tensor:
    of = dynamic_map(is_signed=is_signed)
    tables = (of.offset, of.step, of.inverse, of.shift, of.last, of.borders)
    return torch.stack([torch.nn.functional.pad(table, (0, LEVELS - len(table))) for table in tables])

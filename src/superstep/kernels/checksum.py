"""Checksums: a sum of a tensor's 32-bit words weighted by place, as fast as memory is read.

    checksum = sum of word i · (2 i + 1), modulo 2^64

A word is a signed integer. One flipped bit changes the sum by a power of two below 2^32 times an odd number, two by the
sum or difference of two such products, and two swapped words by the product of both differences: none of these is a
multiple of 2^64, for words 0 to 2^31. Parts of a tensor are summed separately, each from the place of its first word,
and added in any order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from superstep.kernels import compile_cpp
from superstep.kernels.attention import FLAGS
from superstep.kernels.compile_cpp import BuildResult

SOURCES = (Path(__file__).parent / "cpu" / "checksum.cpp",)

BLOCK = 1 << 20
"""Words that torch sums at a time; it makes 64-bit integers of them first."""


@cache
def compile_library() -> BuildResult:
    return compile_cpp.build(SOURCES, FLAGS, compile_cpp.folder_of(SOURCES[0]))


def checksum(values: Tensor, first: int = 0) -> Tensor:
    """The checksum of a contiguous tensor of 32-bit numbers, int64 [] on its device, given its first word's place."""
    library = compile_library().library
    if library is None or values.device.type != "cpu":
        return reference(values, first)
    return _sum_tensors(library.superstep_checksum, [values], values.numel(), first)


def word_sum(values: Tensor) -> Tensor:
    """The plain sum of the words of a contiguous tensor of 32-bit numbers: int64 [] on its device."""
    library = compile_library().library
    if library is None or values.device.type != "cpu":
        return values.detach().view(torch.int32).sum(dtype=torch.int64)
    return _sum_tensors(library.superstep_word_sum, [values], values.numel())


def copy_summed(into: Tensor, values: Tensor, first: int = 0) -> Tensor:
    """Copy a tensor, and return the checksum of the source. ``into`` is only complete when the stream is. ``into``:
    contiguous, of the same dtype and size, on this device or on the host.
    """
    library = compile_library().library
    if library is None or values.device.type != "cpu":
        into.copy_(values, non_blocking=True)
        return reference(values, first)
    return _sum_tensors(library.superstep_copy_summed, [into, values], values.numel(), first)


def reference(values: Tensor, first: int = 0) -> Tensor:
    """``checksum`` by torch alone: on a GPU, or where nothing can be compiled."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    places = 2 * torch.arange(min(BLOCK, values.numel()), device=values.device) + 1
    for at, block in enumerate(values.detach().view(torch.int32).flatten().split(BLOCK)):
        words = block.long()
        total += (words * (places[: len(words)] + 2 * (first + at * BLOCK))).sum()
    return total


def _sum_tensors(function: ctypes._NamedFuncPointer, tensors: Sequence[Tensor], *counts: int) -> Tensor:
    """Call a function of the library; other Python threads run meanwhile."""
    function.restype = c_int64
    return torch.tensor(function(*(c_void_p(x.data_ptr()) for x in tensors), *map(c_int64, counts)))

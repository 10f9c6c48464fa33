"""Constants and functions for all kernels of this folder.

A kernel is a function in Triton's language, of which many copies run, each with its own ``program_id``. Its arguments
are addresses, numbers, and compile-time constants, without Python types.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

LEAST = 16
"""The least side of a tile in a product."""

LEAST_SHARED_BYTES = 99 * 1024
"""Shared memory of a program on every GPU of compute capability 8.0 or newer; no more on 8.6 and 12.0."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run as Python, by TRITON_INTERPRET=1, which has no products of bf16."""


@triton.jit
def dot(left, right, total):
    """total + left · right, summed in fp32. An fp32 product is three of TF32, with 22 bits of each factor."""
    if IS_INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)  # exact, as every number of bf16 is one of fp32
    return tl.dot(left, right, total, input_precision="tf32x3")


def pad_tile(count: int) -> int:
    """The least power of two from ``count`` on, for sides of tiles; at least ``LEAST``."""
    return max(LEAST, 1 << (count - 1).bit_length())


@cache
def read_shared_bytes(device: torch.device) -> int:
    """Shared memory of a program on the device; for interpreted kernels, that of the smallest GPU."""
    if device.type == "cpu":
        return LEAST_SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]

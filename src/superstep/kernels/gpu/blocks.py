"""AdamW of moments in 8 bits, with the bits of ``kernels.blocks``: a program updates a block of 256 numbers.

Products and sums are not contracted, divisions and roots are rounded correctly (``enable_fp_fusion``, ``div_rn``,
``sqrt_rn``).
"""

from __future__ import annotations

from dataclasses import astuple
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from superstep.kernels.blocks.adamw import AdamWNumbers, BlockMoment, pack
from superstep.kernels.blocks.dynamic_map import LEAST_SCALE, SIZE, dynamic_map

LEAST = tl.constexpr(LEAST_SCALE)
BORDERS = tl.constexpr(8)
ROUNDER = tl.constexpr(12582912.0)
"""1.5 · 2^23: added and taken away, it rounds to the nearest integer."""


@triton.jit
def _decode(codes, scale, map, IS_SIGNED: tl.constexpr):
    """The numbers of a block. ``map``: tables of 16 entries: offset, step, inverse, shift, last, borders."""
    rank = codes.to(tl.int32)
    if IS_SIGNED:
        rank -= 127
    size = tl.abs(rank)
    odd = (2 * size + 1 if IS_SIGNED else size + 1).to(tl.float32)
    level = (odd.to(tl.int32, bitcast=True) >> 23) - 127
    value = size.to(tl.float32) * tl.load(map + 16 + level) + tl.load(map + level)
    return tl.where(rank < 0, -value, value) * scale


@triton.jit
def _encode(x, map, IS_SIGNED: tl.constexpr):
    """The codes of a block, and its scale."""
    word = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)  # NaN is above all numbers
    largest = word.to(tl.float32, bitcast=True)
    is_finite = word < 0x7F800000
    is_usual = is_finite & (largest >= LEAST)
    y = tl.where(is_usual, x, 0.0) * tl.div_rn(1.0, tl.where(is_usual, largest, 1.0))
    size = tl.abs(y)
    level = tl.zeros_like(size).to(tl.int32)
    for border in range(BORDERS):
        level += (size >= tl.load(map + 80 + border)).to(tl.int32)
    exact = size * tl.load(map + 32 + level) + tl.load(map + 48 + level)
    rank = tl.minimum((exact + ROUNDER) - ROUNDER, tl.load(map + 64 + level))
    if IS_SIGNED:
        rank = tl.where(y < 0, -tl.minimum(rank, 127.0), rank) + 127.0
    scale = tl.where(is_usual, largest, tl.where(is_finite, 0.0, float("nan")))
    return rank.to(tl.int32).to(tl.uint8), scale


@triton.jit
def _update_blocks(param, grad, first, first_scales, first_map, second, second_scales, second_map, by,
                   BLOCK: tl.constexpr):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    scale, beta1, rest1 = tl.load(by), tl.load(by + 1), tl.load(by + 2)
    beta2, rest2, root_by = tl.load(by + 3), tl.load(by + 4), tl.load(by + 5)
    eps, keep, rate = tl.load(by + 6), tl.load(by + 7), tl.load(by + 8)
    g = tl.div_rn(tl.load(grad + at), scale)
    m = _decode(tl.load(first + at), tl.load(first_scales + block), first_map, IS_SIGNED=True) * beta1 + g * rest1
    v = (
        _decode(tl.load(second + at), tl.load(second_scales + block), second_map, IS_SIGNED=False) * beta2
        + g * g * rest2
    )
    change = tl.div_rn(m, tl.sqrt_rn(v) * root_by + eps) * rate
    tl.store(param + at, tl.load(param + at) * keep - change)
    m_codes, m_scale = _encode(m, first_map, IS_SIGNED=True)
    v_codes, v_scale = _encode(v, second_map, IS_SIGNED=False)
    tl.store(first + at, m_codes)
    tl.store(first_scales + block, m_scale)
    tl.store(second + at, v_codes)
    tl.store(second_scales + block, v_scale)


def update_blocks(param: Tensor, grad: Tensor, first: BlockMoment, second: BlockMoment, numbers: AdamWNumbers) -> None:
    """Update a parameter, fp32 [N], and its two moments in place."""
    device = param.device
    by = torch.tensor(astuple(numbers), dtype=torch.float32).to(device, non_blocking=True)
    moments = [(m.codes, m.scales, _tables(s, device)) for m, s in ((first, True), (second, False))]
    _update_blocks[(param.numel() // SIZE,)](
        param, grad, *moments[0], *moments[1], by, BLOCK=SIZE, num_warps=4, enable_fp_fusion=False
    )


@cache
def _tables(is_signed: bool, device: torch.device) -> Tensor:
    return pack(dynamic_map(is_signed=is_signed)).to(device)

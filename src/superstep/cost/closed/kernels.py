"""Kernels: seconds of products, of attention and of memory traffic.

Products run tile by tile: a wave with one tile takes as long as a full one, so a product that does not fill the last
wave wastes the rest (wave quantisation), and one with dims that the tile does not divide computes on padding. A short
inner dim does not amortise a tile's start and end.
"""

from __future__ import annotations

import numpy as np

from superstep.cost.closed.framework_arrays import ATTENTION, Stack
from superstep.cost.closed.rates import ChipRates
from superstep.hardware.units import Array

TILES: tuple[tuple[int, int, float], ...] = ((256, 128, 1.0), (128, 128, 0.92), (64, 128, 0.75), (64, 64, 0.55))
"""Rows and columns of a tile, and its rate relative to the largest: a small tile reads more for each operation."""

ALIGNED = 8.0
"""Numbers of 16 bits in the 16 bytes that tensor cores load at once."""
UNALIGNED = 0.17
"""Rate of attention's products where a head's rows are not aligned: cuBLAS uses kernels without tensor cores, with a
quarter of the peak (78 of an A100's 312 TFLOP/s). With it steps reach 0.62 to 0.75 of aligned ones, as published.
"""

WHOLE = np.ones(())


def window_share(window: Array, keys: Array) -> Array:
    """The share of the pairs of a query and an earlier key within a sliding window; 0 stands for no window."""
    part = np.where(window > 0, np.minimum(window / keys, 1.0), 1.0)
    share: Array = part * (2 - part)
    return share


def product_s(rows: Array, columns: Array, inner: Array, flops_per_s: Array, rates: ChipRates) -> Array:
    """Seconds of one product [rows, inner] x [inner, columns] in 16 bits, at the best tile for its shape."""
    best = np.asarray(0.0)
    for high, wide, speed in TILES:
        for tall, broad in {(high, wide), (wide, high)}:
            tiles = np.maximum(np.ceil(rows / tall) * np.ceil(columns / broad), 1.0)
            waves = tiles / rates.cores
            filled = waves / np.ceil(waves)
            used = rows * columns / (tiles * tall * broad)
            best = np.maximum(best, speed * filled * used)
    ramp = inner / (inner + rates.product_ramp)
    compute_s = 2 * rows * columns * inner / (flops_per_s * np.maximum(best * ramp, 1e-9))
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    return np.maximum(compute_s, moved / rates.memory_bytes_per_s) + rates.launch_s


def linear_s(
    rows: Array, columns: Array, inner: Array, flops_per_s: Array, rates: ChipRates
) -> tuple[Array, Array, Array]:
    """Seconds of a linear layer: forward, gradient of its input, gradient of its weight."""
    return (
        product_s(rows, columns, inner, flops_per_s, rates),
        product_s(rows, inner, columns, flops_per_s, rates),
        product_s(columns, inner, rows, flops_per_s, rates),
    )


def attention_s(
    heads: Array,
    queries: Array,
    keys: Array,
    head_dim: Array,
    rates: ChipRates,
    stack: Stack,
    seen: Array = WHOLE,
) -> tuple[Array, Array]:
    """Seconds of causal attention, forward and backward.

    Fused kernels skip masked scores and keep none (Dao 2022); their backward computes the scores again: five products
    for two. Others compute the whole square and move it: bytes for each score below.

    Args:
        heads: of all sequences of a microbatch, on one rank.
        seen: share of the causal half within a window (``window_share``).
    """
    square = heads * queries * keys
    # Causal: half of it. Both products of a forward pass are 4 operations for each score and number of a head. Fused
    # kernels are built for heads of multiples of 8; others are filled up.
    even = np.ceil(head_dim / ALIGNED) * ALIGNED
    fused = 2 * seen * square * even / rates.peak_half_flops_per_s
    # Kernels are built for heads of 128; of 64 they reach about three quarters (Dao 2023, fig. 4 to 6). The first ones
    # were built for 64, and are as fast there.
    is_first = stack.attention == ATTENTION.index("flash-1")
    narrow = np.where(is_first, 1.0, np.clip(head_dim / 128, 0.25, 1.0) ** 0.35)
    forward_s = fused / (rates.attention_forward * narrow)
    backward_s = 2.5 * fused / (rates.attention_backward * narrow)
    fit = np.where(even == head_dim, 1.0, UNALIGNED)
    whole = 4 * square * head_dim / (rates.half_flops_per_s * 0.65 * fit)
    is_eager = stack.attention == ATTENTION.index("eager")
    read = np.where(is_eager, 34.0, 13.0) * square / rates.memory_bytes_per_s
    back = np.where(is_eager, 46.0, 19.0) * square / rates.memory_bytes_per_s
    keeps = stack.attention < ATTENTION.index("flash-1")
    return np.where(keeps, whole + read, forward_s), np.where(keeps, 2 * whole + back, backward_s)

"""Kernels: seconds of products, of attention and of memory traffic.

A product runs tile by tile, in waves of one tile for each core. A wave with one tile takes as long as a full wave, so a
product that does not fill its last wave wastes time (wave quantisation). Where the tile does not divide a product's
dims, the tile also computes on padding. A short inner dim does not amortise a tile's start and end.
"""

from __future__ import annotations

import numpy as np

from superstep.cost.closed.framework_arrays import ATTENTION, Stack
from superstep.cost.closed.rates import ChipRates
from superstep.hardware.units import Array

TILES: tuple[tuple[int, int, float], ...] = ((256, 128, 1.0), (128, 128, 0.92), (64, 128, 0.75), (64, 64, 0.55))
"""Rows and columns of a tile, and its rate relative to the largest tile: a small tile reads more for each operation."""

ALIGNED = 8.0
"""Elements of 16 bits in one load of a tensor core, which is of 16 bytes."""
UNALIGNED = 0.17
"""Relative rate of attention's products where a head's rows are not aligned: cuBLAS then uses kernels without tensor
cores, which have a quarter of the peak (78 of an A100's 312 TFLOP/s). With this value predicted steps have 0.62 to 0.75
of the speed of aligned ones, as published steps do.
"""

NO_WINDOW = np.ones(())


def window_share(window: Array, keys: Array) -> Array:
    """The share of the causal pairs (query, key) that lie within a sliding window; a window of 0 means no window."""
    relative = np.where(window > 0, np.minimum(window / keys, 1.0), 1.0)
    share: Array = relative * (2 - relative)
    return share


def product_s(rows: Array, columns: Array, inner: Array, flops_per_s: Array, rates: ChipRates) -> Array:
    """Seconds of one product [rows, inner] x [inner, columns] in 16 bits, at the best tile for its shape."""
    best = np.asarray(0.0)
    for long, short, speed in TILES:
        for tile_rows, tile_columns in {(long, short), (short, long)}:
            tiles = np.maximum(np.ceil(rows / tile_rows) * np.ceil(columns / tile_columns), 1.0)
            waves = tiles / rates.cores
            filled = waves / np.ceil(waves)
            used = rows * columns / (tiles * tile_rows * tile_columns)
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
    in_window: Array = NO_WINDOW,
) -> tuple[Array, Array]:
    """Seconds of causal attention, forward and backward.

    Fused kernels skip masked scores and store no scores (Dao 2022). Their backward pass computes the scores again, so
    it takes five products and the forward pass two. Other kernels compute all scores, and write and read them.

    Args:
        heads: number of heads on one rank, over all sequences of a microbatch.
        in_window: share of the causal scores within a window (``window_share``).
    """
    square = heads * queries * keys
    # The two products of a forward pass take 4 operations for each score and element of a head; the causal mask leaves
    # half of them. Fused kernels are built for a head_dim that is a multiple of 8, and pad another one.
    even = np.ceil(head_dim / ALIGNED) * ALIGNED
    fused = 2 * in_window * square * even / rates.peak_half_flops_per_s
    # FlashAttention 2 and 3 are tuned for a head_dim of 128; at 64 they reach about three quarters of that rate (Dao
    # 2023, fig. 4 to 6). FlashAttention 1 was tuned for 64, and loses nothing there.
    is_first = stack.attention == ATTENTION.index("flash-1")
    narrow = np.where(is_first, 1.0, np.clip(head_dim / 128, 0.25, 1.0) ** 0.35)
    forward_s = fused / (rates.attention_forward * narrow)
    backward_s = 2.5 * fused / (rates.attention_backward * narrow)
    fit = np.where(even == head_dim, 1.0, UNALIGNED)
    products_s = 4 * square * head_dim / (rates.half_flops_per_s * 0.65 * fit)
    is_eager = stack.attention == ATTENTION.index("eager")
    moved_forward_s = np.where(is_eager, 34.0, 13.0) * square / rates.memory_bytes_per_s  # bytes for each score
    moved_backward_s = np.where(is_eager, 46.0, 19.0) * square / rates.memory_bytes_per_s
    stores_scores = stack.attention < ATTENTION.index("flash-1")
    return (
        np.where(stores_scores, products_s + moved_forward_s, forward_s),
        np.where(stores_scores, 2 * products_s + moved_backward_s, backward_s),
    )

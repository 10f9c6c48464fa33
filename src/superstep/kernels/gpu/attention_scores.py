"""Scores of a tile: what is added to them, and which of them count. In units of base 2, as ``exp2`` is an instruction.

Rows and columns come as a column and a row of numbers, or the other way round where the tile is transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from superstep.kernels.gpu.language import LOG2E

NONE, SLOPES, BY_DISTANCE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of bias (``kernels.position_bias``)."""


@triton.jit
def add_bias(scores, place, column, bias, last, BIAS: tl.constexpr):
    """The scores with their bias added.

    ``bias`` is where a head's begins; ``place`` is that of each query among the keys, ``last`` the last distance.
    """
    if BIAS == SLOPES:
        scores -= tl.load(bias) * LOG2E * tl.maximum(place - column, 0).to(tl.float32)
    if BIAS == BY_DISTANCE:
        scores += tl.load(bias + distances(place, column, last)) * LOG2E
    return scores


@triton.jit
def distances(place, column, last):
    """How far back each key lies, as the biases count."""
    return tl.minimum(tl.maximum(place - column, 0), last)


@triton.jit
def mask_scores(scores, place, column, start, keys, CAUSAL: tl.constexpr):
    """The scores that count; the others are -inf."""
    is_seen = (column < keys) & (column >= start)
    if CAUSAL:
        is_seen = is_seen & (column <= place)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def first_keys(starts, row, place, queries, window, STARTS: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that each query of a tile sees; ``starts`` is where those of its sequence begin."""
    first = tl.zeros_like(row)
    if STARTS:
        first = tl.load(starts + row, mask=row < queries, other=0).to(tl.int32)
    if WINDOW:
        first = tl.maximum(first, place - window + 1)
    return first

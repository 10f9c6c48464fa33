"""Scores of a tile: their bias and mask. In base 2, as ``exp2`` is an instruction.

Places are a column and a row of numbers, or the other way round for a transposed tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from superstep.kernels.gpu.language import LOG2E

NONE, SLOPES, BY_DISTANCE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of bias (``kernels.position_bias``)."""


@triton.jit
def add_bias(scores, place, column, bias, last, BIAS: tl.constexpr):
    """Add the bias to the scores. ``bias``: the begin of a head's; ``place``: each query's place among the keys;
    ``last``: the last distance.
    """
    if BIAS == SLOPES:
        scores -= tl.load(bias) * LOG2E * tl.maximum(place - column, 0).to(tl.float32)
    if BIAS == BY_DISTANCE:
        scores += tl.load(bias + distances(place, column, last)) * LOG2E
    return scores


@triton.jit
def distances(place, column, last):
    """How far back each key lies, at most the last distance."""
    return tl.minimum(tl.maximum(place - column, 0), last)


@triton.jit
def mask_scores(scores, place, column, start, keys, CAUSAL: tl.constexpr):
    """The scores, with -inf where a key is not seen."""
    is_visible = (column < keys) & (column >= start)
    if CAUSAL:
        is_visible = is_visible & (column <= place)
    return tl.where(is_visible, scores, float("-inf"))


@triton.jit
def first_keys(starts, row, place, queries, window, STARTS: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that each query of a tile sees; ``starts``: the begin of its sequence's."""
    first = tl.zeros_like(row)
    if STARTS:
        first = tl.load(starts + row, mask=row < queries, other=0).to(tl.int32)
    if WINDOW:
        first = tl.maximum(first, place - window + 1)
    return first

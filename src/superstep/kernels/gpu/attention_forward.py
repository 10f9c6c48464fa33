"""Attention forward: a program has a tile of queries, and goes through the keys that these see (Dao 2023, alg. 1).

Keys come in three runs: those that only some of the queries see, before a document's or a window's start; those that
all see, without a mask; and those at the diagonal or at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from superstep.kernels.gpu.attention_scores import add_bias, first_keys, mask_scores
from superstep.kernels.gpu.language import LN2, LOG2E, dot


@triton.jit
def runs(row, place, first, queries, keys, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr):
    """The begins of the three runs of keys, and the end of the last, in whole tiles of keys."""
    is_there = row < queries
    low = tl.maximum(tl.min(tl.where(is_there, first, keys)), 0) // COLUMNS * COLUMNS
    high, whole_end = keys, keys // COLUMNS * COLUMNS
    if CAUSAL:
        high = tl.minimum(tl.max(tl.where(is_there, place, -1)) + 1, keys)
        whole_end = tl.minimum((tl.min(place) + 1) // COLUMNS * COLUMNS, whole_end)
    high = tl.maximum(tl.cdiv(high, COLUMNS) * COLUMNS, low)
    whole = tl.minimum(tl.cdiv(tl.maximum(tl.max(tl.where(is_there, first, 0)), 0), COLUMNS) * COLUMNS, high)
    return low, tl.maximum(whole, low), tl.maximum(whole_end, whole), high


@triton.jit
def _meet(
    total,
    norm,
    peak,
    q,
    k,
    v,
    bias,
    place,
    first,
    begin,
    end,
    keys,
    last,
    scale,
    k_strides,
    v_strides,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add a run of keys to the sums."""
    h = tl.arange(0, WIDE)
    for at in range(begin, end, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        is_key, is_h = column < keys, h < WIDTH
        k_HC = tl.load(k + column[None, :] * k_strides[2] + h[:, None], mask=is_key[None, :] & is_h[:, None], other=0.0)
        scores = dot(q, k_HC, tl.zeros((q.shape[0], COLUMNS), tl.float32)) * (scale * LOG2E)
        scores = add_bias(scores, place[:, None], column[None, :], bias, last, BIAS)
        if MASKED:
            scores = mask_scores(scores, place[:, None], column[None, :], first[:, None], keys, CAUSAL)
        higher = tl.maximum(peak, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # of queries that have seen no key
        weight = tl.exp2(scores - level[:, None])
        kept = tl.exp2(peak - level)
        v_CH = tl.load(v + column[:, None] * v_strides[2] + h[None, :], mask=is_key[:, None] & is_h[None, :], other=0.0)
        norm = norm * kept + tl.sum(weight, 1)
        total = dot(weight.to(v_CH.dtype), v_CH, total * kept[:, None])
        peak = higher
    return total, norm, peak


@triton.jit
def attention_forward(
    q,
    k,
    v,
    out,
    lse,
    starts,
    bias,
    heads,
    group,
    queries,
    keys,
    ahead,
    window,
    last,
    scale,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr,
    STARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The mixed values and the log-sum-exp of a tile of queries of one head."""
    sequence, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    place = row + ahead
    is_there = (row < queries)[:, None] & (h < WIDTH)[None, :]
    q += sequence * q_strides[0] + head * q_strides[1]
    k += sequence * k_strides[0] + (head // group) * k_strides[1]
    v += sequence * v_strides[0] + (head // group) * v_strides[1]
    out += sequence * out_strides[0] + head * out_strides[1]
    bias += head * (last + 1)
    q_RH = tl.load(q + row[:, None] * q_strides[2] + h[None, :], mask=is_there, other=0.0)
    first = first_keys(starts + sequence * queries, row, place, queries, window, STARTS, WINDOW)

    total = tl.zeros((ROWS, WIDE), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    edges = runs(row, place, first, queries, keys, COLUMNS, CAUSAL)
    for run in tl.static_range(3):
        if run > 0 or STARTS or WINDOW:
            total, norm, peak = _meet(
                total, norm, peak, q_RH, k, v, bias, place, first, edges[run], edges[run + 1], keys, last, scale,
                k_strides, v_strides, WIDTH, WIDE, COLUMNS, CAUSAL, BIAS, MASKED=run != 1,
            )  # fmt: skip

    total /= tl.where(norm == 0.0, 1.0, norm)[:, None]
    tl.store(out + row[:, None] * out_strides[2] + h[None, :], total.to(out.dtype.element_ty), mask=is_there)
    tl.store(lse + tl.program_id(1) * queries + row, (peak + tl.log2(norm)) * LN2, mask=row < queries)

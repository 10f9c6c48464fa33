"""Attention forward: each program has a tile of queries and goes through their visible keys (Dao 2023, alg. 1).

It goes through three ranges of keys. In the first, at the start of a document or window, only some of the queries see a
key; in the second all queries see all keys, so it needs no mask; the third is at the diagonal or at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from superstep.kernels.gpu.attention_scores import add_bias, first_keys, mask_scores
from superstep.kernels.gpu.language import LN2, LOG2E, dot


@triton.jit
def key_ranges(row, place, first, queries, keys, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr):
    """The starts of the three ranges of keys, and the end of the last one: multiples of a tile's keys."""
    is_query = row < queries
    low = tl.maximum(tl.min(tl.where(is_query, first, keys)), 0) // COLUMNS * COLUMNS
    high, whole_end = keys, keys // COLUMNS * COLUMNS
    if CAUSAL:
        high = tl.minimum(tl.max(tl.where(is_query, place, -1)) + 1, keys)
        whole_end = tl.minimum((tl.min(place) + 1) // COLUMNS * COLUMNS, whole_end)
    high = tl.maximum(tl.cdiv(high, COLUMNS) * COLUMNS, low)
    whole = tl.minimum(tl.cdiv(tl.maximum(tl.max(tl.where(is_query, first, 0)), 0), COLUMNS) * COLUMNS, high)
    return low, tl.maximum(whole, low), tl.maximum(whole_end, whole), high


@triton.jit
def _add_keys(
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
    """Add a range of keys to the sums: the weighted values, their norm and the peak score of each query."""
    h = tl.arange(0, WIDE)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_key, is_h = column < keys, h < WIDTH
        k_HC = tl.load(k + column[None, :] * k_strides[2] + h[:, None], mask=is_key[None, :] & is_h[:, None], other=0.0)
        scores = dot(q, k_HC, tl.zeros((q.shape[0], COLUMNS), tl.float32)) * (scale * LOG2E)
        scores = add_bias(scores, place[:, None], column[None, :], bias, last, BIAS)
        if MASKED:
            scores = mask_scores(scores, place[:, None], column[None, :], first[:, None], keys, CAUSAL)
        higher = tl.maximum(peak, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # -inf for a query without a key so far
        weight = tl.exp2(scores - level[:, None])
        rescale = tl.exp2(peak - level)
        v_CH = tl.load(v + column[:, None] * v_strides[2] + h[None, :], mask=is_key[:, None] & is_h[None, :], other=0.0)
        norm = norm * rescale + tl.sum(weight, 1)
        total = dot(weight.to(v_CH.dtype), v_CH, total * rescale[:, None])
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
    """The attention output and the log-sum-exp of the scores, for a tile of queries of one head."""
    sequence, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    place = row + ahead
    is_inside = (row < queries)[:, None] & (h < WIDTH)[None, :]
    q += sequence * q_strides[0] + head * q_strides[1]
    k += sequence * k_strides[0] + (head // group) * k_strides[1]
    v += sequence * v_strides[0] + (head // group) * v_strides[1]
    out += sequence * out_strides[0] + head * out_strides[1]
    bias += head * (last + 1)
    q_RH = tl.load(q + row[:, None] * q_strides[2] + h[None, :], mask=is_inside, other=0.0)
    first = first_keys(starts + sequence * queries, row, place, queries, window, STARTS, WINDOW)

    total = tl.zeros((ROWS, WIDE), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    edges = key_ranges(row, place, first, queries, keys, COLUMNS, CAUSAL)
    for part in tl.static_range(3):
        if part > 0 or STARTS or WINDOW:
            total, norm, peak = _add_keys(
                total, norm, peak, q_RH, k, v, bias, place, first, edges[part], edges[part + 1], keys, last, scale,
                k_strides, v_strides, WIDTH, WIDE, COLUMNS, CAUSAL, BIAS, MASKED=part != 1,
            )  # fmt: skip

    total /= tl.where(norm == 0.0, 1.0, norm)[:, None]
    tl.store(out + row[:, None] * out_strides[2] + h[None, :], total.to(out.dtype.element_ty), mask=is_inside)
    tl.store(lse + tl.program_id(1) * queries + row, (peak + tl.log2(norm)) * LN2, mask=row < queries)

"""Attention backward: scores are computed again from the log-sum-exp (Dao 2022, alg. 4).

    P = exp(scores - lse)    dV = Pᵀ · dOut    dScores = P · (dOut · Vᵀ - delta)    delta = rowsum(dOut · out)
    dQ = scale · dScores · K    dK = scale · dScoresᵀ · Q    dBias: sums of dScores along diagonals

One kernel has a tile of queries and goes through the keys, the other has a tile of keys and goes through the queries of
all heads that share it, so every gradient has one writer and a fixed order of sums. Only the bias has many writers, in
any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from superstep.kernels.gpu.attention_forward import key_ranges
from superstep.kernels.gpu.attention_scores import BY_DISTANCE, add_bias, distances, first_keys, mask_scores
from superstep.kernels.gpu.language import LOG2E, dot


@triton.jit
def attention_delta(
    grad, out, delta, heads, queries, grad_strides, out_strides, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """delta of a tile of queries of one head."""
    sequence, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    is_there = (row < queries)[:, None] & (h < WIDTH)[None, :]
    grad += sequence * grad_strides[0] + head * grad_strides[1]
    out += sequence * out_strides[0] + head * out_strides[1]
    grad_RH = tl.load(grad + row[:, None] * grad_strides[2] + h[None, :], mask=is_there, other=0.0).to(tl.float32)
    out_RH = tl.load(out + row[:, None] * out_strides[2] + h[None, :], mask=is_there, other=0.0).to(tl.float32)
    tl.store(delta + tl.program_id(1) * queries + row, tl.sum(grad_RH * out_RH, 1), mask=row < queries)


@triton.jit
def _levels(lse, row, queries):
    """Each query's lse in base 2; for missing queries, or those that saw no key, a value that leaves no weight."""
    level = tl.load(lse + row, mask=row < queries, other=float("inf"))
    return tl.where(level == float("-inf"), float("inf"), level) * LOG2E


@triton.jit
def _meet_keys(
    dq_RH, far, q_RH, grad_RH, level, delta, k, v, bias, dbias, place, first, begin, end, keys, last, scale,
    k_strides, v_strides, WIDTH: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
    BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add a run of keys to the queries' gradients; returns also the bias's gradient at the last distance."""
    h = tl.arange(0, WIDE)
    for at in range(begin, end, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        is_there = (column < keys)[:, None] & (h < WIDTH)[None, :]
        k_CH = tl.load(k + column[:, None] * k_strides[2] + h[None, :], mask=is_there, other=0.0)
        v_CH = tl.load(v + column[:, None] * v_strides[2] + h[None, :], mask=is_there, other=0.0)
        nothing = tl.zeros((q_RH.shape[0], COLUMNS), tl.float32)
        scores = dot(q_RH, tl.trans(k_CH), nothing) * (scale * LOG2E)
        scores = add_bias(scores, place[:, None], column[None, :], bias, last, BIAS)
        if MASKED:
            scores = mask_scores(scores, place[:, None], column[None, :], first[:, None], keys, CAUSAL)
        weight = tl.exp2(scores - level[:, None])
        dscores = weight * (dot(grad_RH, tl.trans(v_CH), nothing) - delta[:, None])
        if BIAS == BY_DISTANCE:
            if at + COLUMNS - 1 + last <= tl.min(place):
                far += tl.sum(dscores)
            else:
                tl.atomic_add(dbias + distances(place[:, None], column[None, :], last), dscores)
        dq_RH = dot(dscores.to(k_CH.dtype), k_CH, dq_RH)
    return dq_RH, far


@triton.jit
def attention_queries_backward(
    grad, q, k, v, lse, delta, dq, starts, bias, dbias, heads, group, queries, keys, ahead, window, last, scale,
    grad_strides, q_strides, k_strides, v_strides, dq_strides, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, STARTS: tl.constexpr, WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries of one head, and its share of the bias's."""
    sequence, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    place = row + ahead
    is_there = (row < queries)[:, None] & (h < WIDTH)[None, :]
    grad += sequence * grad_strides[0] + head * grad_strides[1]
    q += sequence * q_strides[0] + head * q_strides[1]
    k += sequence * k_strides[0] + (head // group) * k_strides[1]
    v += sequence * v_strides[0] + (head // group) * v_strides[1]
    dq += sequence * dq_strides[0] + head * dq_strides[1]
    bias += head * (last + 1)
    dbias += head * (last + 1)
    q_RH = tl.load(q + row[:, None] * q_strides[2] + h[None, :], mask=is_there, other=0.0)
    grad_RH = tl.load(grad + row[:, None] * grad_strides[2] + h[None, :], mask=is_there, other=0.0)
    level = _levels(lse + tl.program_id(1) * queries, row, queries)
    delta_R = tl.load(delta + tl.program_id(1) * queries + row, mask=row < queries, other=0.0)
    first = first_keys(starts + sequence * queries, row, place, queries, window, STARTS, WINDOW)

    dq_RH = tl.zeros((ROWS, WIDE), tl.float32)
    far = 0.0
    edges = key_ranges(row, place, first, queries, keys, COLUMNS, CAUSAL)
    for run in tl.static_range(3):
        if run > 0 or STARTS or WINDOW:
            dq_RH, far = _meet_keys(
                dq_RH, far, q_RH, grad_RH, level, delta_R, k, v, bias, dbias, place, first, edges[run], edges[run + 1],
                keys, last, scale, k_strides, v_strides, WIDTH, WIDE, COLUMNS, CAUSAL, BIAS, MASKED=run != 1,
            )  # fmt: skip
    if BIAS == BY_DISTANCE:
        tl.atomic_add(dbias + last, far)
    tl.store(dq + row[:, None] * dq_strides[2] + h[None, :], (dq_RH * scale).to(dq.dtype.element_ty), mask=is_there)


@triton.jit
def _meet_queries(
    dk_CH, dv_CH, k_CH, v_CH, q, grad, lse, delta, starts, bias, column, begin, end, queries, keys, ahead, window, last,
    scale, q_strides, grad_strides, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    STARTS: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add a run of queries to the keys' and values' gradients. Scores are transposed: [C, R]."""
    h = tl.arange(0, WIDE)
    for at in range(begin, end, ROWS):
        row = at + tl.arange(0, ROWS)
        place = row + ahead
        is_there = (row < queries)[:, None] & (h < WIDTH)[None, :]
        q_RH = tl.load(q + row[:, None] * q_strides[2] + h[None, :], mask=is_there, other=0.0)
        grad_RH = tl.load(grad + row[:, None] * grad_strides[2] + h[None, :], mask=is_there, other=0.0)
        nothing = tl.zeros((k_CH.shape[0], ROWS), tl.float32)
        scores = dot(k_CH, tl.trans(q_RH), nothing) * (scale * LOG2E)
        scores = add_bias(scores, place[None, :], column[:, None], bias, last, BIAS)
        if MASKED:
            first = first_keys(starts, row, place, queries, window, STARTS, WINDOW)
            scores = mask_scores(scores, place[None, :], column[:, None], first[None, :], keys, CAUSAL)
        weight = tl.exp2(scores - _levels(lse, row, queries)[None, :])
        dv_CH = dot(weight.to(grad_RH.dtype), grad_RH, dv_CH)
        delta_R = tl.load(delta + row, mask=row < queries, other=0.0)
        dscores = weight * (dot(v_CH, tl.trans(grad_RH), nothing) - delta_R[None, :])
        dk_CH = dot(dscores.to(q_RH.dtype), q_RH, dk_CH)
    return dk_CH, dv_CH


@triton.jit
def attention_keys_backward(
    grad, q, k, v, lse, delta, dk, dv, starts, stops, bias, heads, group, queries, keys, ahead, window, last, scale,
    grad_strides, q_strides, k_strides, v_strides, dk_strides, dv_strides, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, STARTS: tl.constexpr, WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values of one key head; ``stops``: the end of a tile's queries."""
    kv_heads = heads // group
    sequence, head = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    begin = tl.program_id(0) * COLUMNS
    column, h = begin + tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    is_there = (column < keys)[:, None] & (h < WIDTH)[None, :]
    k += sequence * k_strides[0] + head * k_strides[1]
    v += sequence * v_strides[0] + head * v_strides[1]
    k_CH = tl.load(k + column[:, None] * k_strides[2] + h[None, :], mask=is_there, other=0.0)
    v_CH = tl.load(v + column[:, None] * v_strides[2] + h[None, :], mask=is_there, other=0.0)

    low, whole, high = 0, 0, queries
    if CAUSAL:
        low = tl.minimum(tl.maximum(begin - ahead, 0) // ROWS * ROWS, queries)
        whole = tl.maximum(begin + COLUMNS - 1 - ahead, 0)
    if STARTS:
        high = tl.load(stops + sequence * tl.num_programs(0) + tl.program_id(0)).to(tl.int32)
    if WINDOW:
        high = tl.minimum(high, begin + COLUMNS - 1 + window - ahead)
    if STARTS or WINDOW:
        whole = high
    high = tl.maximum(high, low)
    whole = tl.maximum(tl.minimum(tl.cdiv(whole, ROWS), tl.cdiv(high, ROWS)) * ROWS, low)

    dk_CH, dv_CH = tl.zeros((COLUMNS, WIDE), tl.float32), tl.zeros((COLUMNS, WIDE), tl.float32)
    for member in range(group):
        one = head * group + member
        at = sequence * heads + one
        for run in tl.static_range(2):
            edges = (low, whole, high)
            dk_CH, dv_CH = _meet_queries(
                dk_CH, dv_CH, k_CH, v_CH, q + sequence * q_strides[0] + one * q_strides[1],
                grad + sequence * grad_strides[0] + one * grad_strides[1], lse + at * queries, delta + at * queries,
                starts + sequence * queries, bias + one * (last + 1), column, edges[run], edges[run + 1], queries, keys,
                ahead, window, last, scale, q_strides, grad_strides, WIDTH, WIDE, ROWS, CAUSAL, STARTS, WINDOW, BIAS,
                MASKED=run == 0,
            )  # fmt: skip
    dk += sequence * dk_strides[0] + head * dk_strides[1] + column[:, None] * dk_strides[2] + h[None, :]
    dv += sequence * dv_strides[0] + head * dv_strides[1] + column[:, None] * dv_strides[2] + h[None, :]
    tl.store(dk, (dk_CH * scale).to(dk.dtype.element_ty), mask=is_there)
    tl.store(dv, dv_CH.to(dv.dtype.element_ty), mask=is_there)

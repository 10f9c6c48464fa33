"""The states of linear attention, passed from chunk to chunk in one launch, and their gradients passed back.

A program has some columns of the state of one head of one piece in registers, and goes through the piece's chunks. The
names are those of ``numerics.delta_rule.rule``: for each chunk, in order

    n = u - w S;    S ← e^(c_C) S + (e^(c_C - c) k)ᵀ n

and backward, with what the outputs give to dn and dS,

    dn ← dn + (e^(c_C - c) k) dS';    dS = e^(c_C) dS' + dS - wᵀ dn

    M  chunks    N  heads    C  tokens of a chunk    H  width of a key    V  width of a value
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from superstep.kernels.gpu.language import IS_INTERPRETED, dot, pad_tile

IS_COMPILED = not IS_INTERPRETED.value
COLUMNS = 32
"""The most columns of a state that a program holds, and a half of it for keys wider than ``WIDE``."""

WIDE = 128


@triton.jit
def _places(number, rows, ROWS: tl.constexpr, width, COLUMNS: tl.constexpr, first):
    """Places of a tile of the ``number``-th matrix, and which of them there are."""
    row, column = tl.arange(0, ROWS)[:, None], first + tl.arange(0, COLUMNS)[None, :]
    return number * rows * width + row * width + column, (row < rows) & (column < width)


@triton.jit
def _pass_states(
    u, w, keys, end, first, states, corrected, last, starts, lengths, heads, width, values, C: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, IS_KEPT: tl.constexpr,
):  # fmt: skip
    piece, head, column = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1) * V
    at, is_state = _places(tl.program_id(0).to(tl.int64), width, H, values, V, column)
    state = tl.load(first + at, mask=is_state, other=0.0)
    for n in range(tl.load(lengths + piece)):
        chunk = (tl.load(starts + n) + piece).to(tl.int64) * heads + head
        of_keys, is_key = _places(chunk, C, C, width, H, 0)
        of_values, is_value = _places(chunk, C, C, values, V, column)
        w_CH = tl.load(w + of_keys, mask=is_key, other=0.0)
        n_CV = dot(-w_CH, state, tl.load(u + of_values, mask=is_value, other=0.0))
        if IS_KEPT:
            before, _ = _places(chunk, width, H, values, V, column)
            tl.store(states + before, state, mask=is_state)
            tl.store(corrected + of_values, n_CV, mask=is_value)
        k_CH = tl.load(keys + of_keys, mask=is_key, other=0.0)
        state = dot(tl.trans(k_CH), n_CV, state * tl.load(end + chunk))
    tl.store(last + at, state, mask=is_state)


@triton.jit
def _pass_gradients(
    of_n, of_state, w, keys, end, last, of_corrected, of_states, first, starts, lengths, heads, width, values,
    C: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    piece, head, column = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1) * V
    at, is_state = _places(tl.program_id(0).to(tl.int64), width, H, values, V, column)
    state = tl.load(last + at, mask=is_state, other=0.0)
    length = tl.load(lengths + piece)
    for back in range(length):
        chunk = (tl.load(starts + length - 1 - back) + piece).to(tl.int64) * heads + head
        of_keys, is_key = _places(chunk, C, C, width, H, 0)
        of_values, is_value = _places(chunk, C, C, values, V, column)
        here, _ = _places(chunk, width, H, values, V, column)
        tl.store(of_states + here, state, mask=is_state)
        k_CH = tl.load(keys + of_keys, mask=is_key, other=0.0)
        dn_CV = dot(k_CH, state, tl.load(of_n + of_values, mask=is_value, other=0.0))
        tl.store(of_corrected + of_values, dn_CV, mask=is_value)
        w_CH = tl.load(w + of_keys, mask=is_key, other=0.0)
        state = state * tl.load(end + chunk) + tl.load(of_state + here, mask=is_state, other=0.0)
        state = dot(tl.trans(-w_CH), dn_CV, state)
    tl.store(first + at, state, mask=is_state)


Kept = tuple[Tensor, Tensor, Tensor]
"""The states before each chunk, [M, N, H, V], the corrected values, [M, N, C, V], and the last state of each piece."""


Steps = tuple[Tensor, Tensor]
"""int32: the number of the first of all pieces' n-th chunks, for each n; and the number of chunks of each piece."""


def pass_states(
    u: Tensor, w: Tensor, keys: Tensor, end: Tensor, steps: Steps, first: Tensor, *, is_kept: bool = True
) -> Kept:
    """Pass the states on.

    Args:
        u: fp32 [M, N, C, V]; ``w`` and ``keys`` [M, N, C, H]; ``end`` [M, N].
        first: the state before each piece, [pieces, N, H, V].
        is_kept: whether states and corrected values are wanted; else they are empty.
    """
    chunks, last = u.shape[0] if is_kept else 0, torch.empty_like(first)
    states = first.new_empty(chunks, *first.shape[1:])
    corrected = u.new_empty(chunks, *u.shape[1:])
    inputs = (x.contiguous() for x in (u, w, keys, end, first))
    grid, sizes, tiles = _grid(u, first)
    _pass_states[grid](*inputs, states, corrected, last, *steps, *sizes, **tiles, IS_KEPT=is_kept)
    return states, corrected, last


def pass_gradients(
    read: tuple[Tensor, Tensor], w: Tensor, keys: Tensor, end: Tensor, steps: Steps, last: Tensor
) -> Kept:
    """Pass the gradients of the states back.

    Args:
        read: what the outputs give to n, [M, N, C, V], and to the states before each chunk, [M, N, H, V].
        w, keys, end: as of ``pass_states``.
        last: the gradient of the state after each piece.

    Returns:
        The gradients of n, of each chunk's state after it, and of the state before each piece.
    """
    of_corrected, of_states, first = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*read, last))
    inputs = (x.contiguous() for x in (*read, w, keys, end, last))
    grid, sizes, tiles = _grid(of_corrected, last)
    _pass_gradients[grid](*inputs, of_corrected, of_states, first, *steps, *sizes, **tiles)
    return of_corrected, of_states, first


def _grid(u: Tensor, state: Tensor) -> tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]:
    """Programs, sizes and sides of tiles."""
    pieces, heads, width, values = state.shape
    rows = pad_tile(width)
    columns = min(pad_tile(values), COLUMNS if rows <= WIDE else COLUMNS // 2)
    return (
        (pieces * heads, triton.cdiv(values, columns)),
        (heads, width, values),
        # One stage: what is read ahead would take more shared memory than small GPUs have.
        {"C": u.shape[2], "H": rows, "V": columns, "num_stages": 1, "num_warps": 8 if rows >= WIDE else 4},
    )

"""Causal attention of neighbouring parts of a sequence, each of which sees itself alone.

``cuts`` says for each row where its parts begin, from 0 on, and last how many tokens there are. No score between two
parts is computed. A CPU goes part by part; a GPU takes all parts of all rows in one launch where its kernel can.

    B  sequences    N  query heads           S  tokens    T  tokens of all rows: B · S
    K  key and value heads                   H  width of one head
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Self

import torch
from torch import Tensor

from superstep.runtime.parallel.flash_block import attend_block, attend_block_backward, has_flash

_ATEN = torch.ops.aten

Cuts = Sequence[Sequence[int]]
Qkv = tuple[Tensor, Tensor, Tensor]


def bounds(starts_BS: Tensor) -> list[list[int]]:
    """Of each row: where its documents start, from 0 on, and last its length."""
    tokens = starts_BS.shape[1]
    is_first = starts_BS == torch.arange(tokens)
    return [[*row.nonzero().flatten().tolist(), tokens] for row in is_first]


def attend_parts(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, cuts: Cuts) -> tuple[Tensor, Tensor]:
    """The output [B, N, S, H] and lse [B, N, S], fp32; neither shares memory with an argument."""
    B, N, S, H = q_BNSH.shape
    if has_flash(q_BNSH):
        ends = _Ends.of(cuts, S, q_BNSH.device)
        q, k, v = (_in_a_row(x) for x in (q_BNSH, k_BKSH, v_BKSH))
        out_TNH, lse_NT, *_ = _ATEN._flash_attention_forward(
            q,
            k,
            v,
            ends.places,
            ends.places,
            ends.longest,
            ends.longest,
            0.0,
            True,  # noqa: FBT003
            False,  # noqa: FBT003
        )
        return out_TNH.view(B, S, N, H).transpose(1, 2), lse_NT.view(N, B, S).transpose(0, 1).contiguous()
    out = q_BNSH.new_empty(B, S, N, H).transpose(1, 2)
    lse = q_BNSH.new_empty(B, N, S, dtype=torch.float32)
    for at in _places(cuts):
        out[at], lse[at] = attend_block(q_BNSH[at], k_BKSH[at], v_BKSH[at], is_causal=True)
    return out, lse


def attend_parts_backward(grad_BNSH: Tensor, inputs: Qkv, out_BNSH: Tensor, lse_BNS: Tensor, cuts: Cuts) -> Qkv:
    """The parts' share of the gradients of ``inputs`` (q, k, v); ``out`` and ``lse`` are of all keys, as for
    ``attend_block_backward``.
    """
    B, _, S, H = inputs[0].shape
    if has_flash(inputs[0]):
        ends = _Ends.of(cuts, S, inputs[0].device)
        grad, q, k, v, out = (_in_a_row(x) for x in (grad_BNSH, *inputs, out_BNSH))
        lse_NT = lse_BNS.transpose(0, 1).reshape(lse_BNS.shape[1], B * S)
        no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
        where = ends.places, ends.places, ends.longest, ends.longest
        found = _ATEN._flash_attention_backward(grad, q, k, v, out, lse_NT, *where, 0.0, True, no_seed, no_seed)  # noqa: FBT003
        dq, dk, dv = (x.view(B, S, -1, H).transpose(1, 2) for x in found)
        return dq, dk, dv
    grads = tuple(x.new_empty(B, S, x.shape[1], H).transpose(1, 2) for x in inputs)
    for at in _places(cuts):
        q, k, v = (x[at] for x in inputs)
        shares = attend_block_backward(grad_BNSH[at], (q, k, v), out_BNSH[at], lse_BNS[at], is_causal=True)
        for grad, share in zip(grads, shares, strict=True):
            grad[at] = share
    return grads[0], grads[1], grads[2]


def _places(cuts: Cuts) -> Iterator[tuple[slice, slice, slice]]:
    """Each part of each row, as what picks it out of [B, heads, S, ...]."""
    for row, cut in enumerate(cuts):
        for start, stop in pairwise(cut):
            yield slice(row, row + 1), slice(None), slice(start, stop)


def _in_a_row(x_BNSH: Tensor) -> Tensor:
    """[T, N, H]."""
    return x_BNSH.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Ends:
    """The parts of all rows in one row, as kernels for sequences of many lengths want them.

    Attributes:
        places: int32, where each part starts, and last where they end.
        longest: tokens of the longest part.
    """

    places: Tensor
    longest: int

    @classmethod
    def of(cls, cuts: Cuts, tokens: int, device: torch.device) -> Self:
        starts = chain.from_iterable((row * tokens + start for start in cut[:-1]) for row, cut in enumerate(cuts))
        places = [*starts, len(cuts) * tokens]
        longest = max(stop - start for start, stop in pairwise(places))
        return cls(torch.tensor(places, dtype=torch.int32).to(device, non_blocking=True), longest)

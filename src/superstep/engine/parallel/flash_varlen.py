"""Causal attention of consecutive parts of a sequence, each of which attends to itself alone.

``cuts`` has the starts of each row's parts, from 0 on, and last the number of tokens. A GPU computes all parts of all
rows in one launch where its kernel can. A CPU computes narrow rows whole, under a mask: masked scores cost less there
than a new layout. Wider rows are computed part by part, without scores between parts; short parts, of which a call each
would cost more than its products, are stacked with others of about their length::

    a a a b b │ c c c . .        a a a
                           ->    b b ·        padding comes last, so that no token sees it
                                 c c c

    B  sequences    N  query heads           S  tokens    T  tokens of all rows: B · S
    K  key and value heads                   H  width of one head
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Self

import torch
from torch import Tensor

from superstep.engine.parallel.flash_partial import attend_block, attend_block_backward
from superstep.model.fused_attention import fill_up, has_flash
from superstep.numerics.sending import send

_ATEN = torch.ops.aten

SHORT = 128
"""Tokens of the longest part that is stacked with others."""

NARROW = 128
"""Tokens of the widest row that is computed whole: at 64 that takes a third of the time of parts, at 128 about as long
(AVX-512, torch 2.13).
"""

Cuts = Sequence[Sequence[int]]
Qkv = tuple[Tensor, Tensor, Tensor]


def bounds(starts_BS: Tensor) -> list[list[int]]:
    """For each row, the starts of its documents, from 0 on, and last its length."""
    tokens = starts_BS.shape[1]
    is_first = starts_BS == torch.arange(tokens)
    return [[*row.nonzero().flatten().tolist(), tokens] for row in is_first]


def starts_of(cuts: Cuts) -> Tensor:
    """The inverse of ``bounds``."""
    begins, sizes = zip(*((start, stop - start) for cut in cuts for start, stop in pairwise(cut)), strict=True)
    return torch.tensor(begins).repeat_interleave(torch.tensor(sizes)).view(len(cuts), -1)


def attend_parts(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, cuts: Cuts) -> tuple[Tensor, Tensor]:
    """The output [B, N, S, H] and lse [B, N, S], fp32; neither shares memory with an argument."""
    B, N, S, H = q_BNSH.shape
    if has_flash(q_BNSH):
        ends = _Ends.of(cuts, S, q_BNSH.device)
        q, k, v = (_in_a_row(fill_up(x)) for x in (q_BNSH, k_BKSH, v_BKSH))
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
            scale=1 / math.sqrt(H),
        )
        return out_TNH.view(B, S, N, -1)[..., :H].transpose(1, 2), lse_NT.view(N, B, S).transpose(0, 1).contiguous()
    if _is_narrow(q_BNSH):
        wide = (x.float() for x in (q_BNSH, k_BKSH, v_BKSH))
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, attn_mask=_mask(cuts))
        return out.to(q_BNSH.dtype), lse
    out = q_BNSH.new_empty(B, S, N, H).transpose(1, 2)
    lse = q_BNSH.new_empty(B, N, S, dtype=torch.float32)
    for stack in _stacks(cuts, S, q_BNSH.device):
        part, part_lse = attend_block(*(stack.lay(x) for x in (q_BNSH, k_BKSH, v_BKSH)), is_causal=True)
        stack.back(part, out)
        stack.back(part_lse[..., None], lse[..., None])
    return out, lse


def attend_parts_backward(grad_BNSH: Tensor, inputs: Qkv, out_BNSH: Tensor, lse_BNS: Tensor, cuts: Cuts) -> Qkv:
    """The parts' share of the gradients of ``inputs`` (q, k, v); ``out`` and ``lse`` are of all keys, as for
    ``attend_block_backward``.
    """
    B, _, S, H = inputs[0].shape
    if has_flash(inputs[0]):
        ends = _Ends.of(cuts, S, inputs[0].device)
        grad, q, k, v, out = (_in_a_row(fill_up(x)) for x in (grad_BNSH, *inputs, out_BNSH))
        lse_NT = lse_BNS.transpose(0, 1).reshape(lse_BNS.shape[1], B * S)
        no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
        given = grad, q, k, v, out, lse_NT, ends.places, ends.places, ends.longest, ends.longest
        op, scale = _ATEN._flash_attention_backward, 1 / math.sqrt(H)
        gradients = op(*given, 0.0, True, no_seed, no_seed, scale=scale)  # noqa: FBT003
        dq, dk, dv = (x.unflatten(0, (B, S))[..., :H].transpose(1, 2) for x in gradients)
        return dq, dk, dv
    if _is_narrow(inputs[0]):
        wide = (x.float() for x in (grad_BNSH, *inputs, out_BNSH))
        op = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = op(*wide, lse_BNS.contiguous(), 0.0, False, attn_mask=_mask(cuts))  # noqa: FBT003
        dq, dk, dv = (x.to(inputs[0].dtype) for x in gradients)
        return dq, dk, dv
    grads = tuple(x.new_empty(B, S, x.shape[1], H).transpose(1, 2) for x in inputs)
    for stack in _stacks(cuts, S, inputs[0].device):
        q, k, v = (stack.lay(x) for x in inputs)
        # exp(score - inf) is 0: padding has no gradient.
        lse = stack.lay(lse_BNS[..., None], fill=torch.inf)[..., 0]
        grad, out = (stack.lay(x, fill=0.0) for x in (grad_BNSH, out_BNSH))
        for share, whole in zip(attend_block_backward(grad, (q, k, v), out, lse, is_causal=True), grads, strict=True):
            stack.back(share, whole)
    return grads[0], grads[1], grads[2]


def _is_narrow(x_BNSH: Tensor) -> bool:
    return not x_BNSH.is_cuda and x_BNSH.shape[2] <= NARROW


def _mask(cuts: Cuts) -> Tensor:
    """The additive mask of whole rows: [B, 1, S, S], fp32."""
    tokens = cuts[0][-1]
    starts_BS = starts_of(cuts)
    is_visible = (starts_BS[:, :, None] == starts_BS[:, None, :]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return torch.zeros(is_visible.shape).masked_fill_(~is_visible, -torch.inf)[:, None]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Stacked parts.

    Attributes:
        source: for each place, the index of its token among all rows: [P, L]. Padding repeats its part's last.
        is_filled: for each place, whether it is padding: [P, L].
        places: indices without padding.
        tokens: the token of each of these among all rows.
    """

    source: Tensor
    is_filled: Tensor
    places: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int]], device: torch.device) -> Self:
        """Stack parts, from first to last token (exclusive), padded to the longest."""
        starts, stops = torch.tensor(parts).unbind(1)
        places = starts[:, None] + torch.arange(int((stops - starts).max()))
        source = torch.minimum(places, stops[:, None] - 1)
        is_filled = places >= stops[:, None]
        # Computed on the host: their number would make it wait for a GPU.
        tensors = source, is_filled, (~is_filled).flatten().nonzero().flatten(), source[~is_filled]
        return cls(*(send(each, device) for each in tensors))

    def lay(self, x_BNSH: Tensor, fill: float | None = None) -> Tensor:
        """[P, N, L, H]; with ``fill`` None the padding is arbitrary."""
        x_PLNH = _in_a_row(x_BNSH)[self.source]
        if fill is not None:
            x_PLNH.masked_fill_(self.is_filled[..., None, None], fill)
        return x_PLNH.transpose(1, 2)

    def back(self, x_PNLH: Tensor, into_BNSH: Tensor) -> None:
        """The inverse: write the parts to their places in the rows."""
        S = into_BNSH.shape[2]
        into_BNSH.transpose(1, 2)[self.tokens // S, self.tokens % S] = _in_a_row(x_PNLH)[self.places]


def _stacks(cuts: Cuts, tokens: int, device: torch.device) -> Iterator[_Stack]:
    """All parts: short ones of about one length together, and each long one alone."""
    alike: dict[int, list[tuple[int, int]]] = {}
    for row, cut in enumerate(cuts):
        for start, stop in pairwise(cut):
            part = row * tokens + start, row * tokens + stop
            if stop - start <= SHORT:
                alike.setdefault((stop - start - 1).bit_length(), []).append(part)
            else:
                yield _Stack.of([part], device)
    yield from (_Stack.of(parts, device) for parts in alike.values())


def _in_a_row(x_BNSH: Tensor) -> Tensor:
    """[T, N, H]."""
    return x_BNSH.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Ends:
    """The parts of all rows in one row, for kernels of variable-length sequences.

    Attributes:
        places: int32, the start of each part, and last their end.
        longest: tokens of the longest part.
    """

    places: Tensor
    longest: int

    @classmethod
    def of(cls, cuts: Cuts, tokens: int, device: torch.device) -> Self:
        starts = chain.from_iterable((row * tokens + start for start in cut[:-1]) for row, cut in enumerate(cuts))
        places = [*starts, len(cuts) * tokens]
        longest = max(stop - start for start, stop in pairwise(places))
        return cls(send(torch.tensor(places, dtype=torch.int32), device), longest)

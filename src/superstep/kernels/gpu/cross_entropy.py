"""Linear and cross entropy in chunks of tokens, whose logits are never all in memory (Hsu 2024).

    T  tokens    V  vocabulary    C  tokens of a chunk
    D  width

A chunk's logits are a product of torch's; one kernel reads them twice, and leaves their gradient in their place.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

IGNORE = -100
"""The target of a position that does not count, as ``numerics.loss`` has it."""

CHUNK_TOKENS = 2048
COLUMNS = 4096
"""Logits that a program has in its registers at once."""


@triton.jit
def _rows(logits, targets, losses, vocab, ignored, scale, COLUMNS: tl.constexpr):
    """The loss of a token in nats, and in the place of its logits scale · (softmax - onehot)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    target = tl.load(targets + row)
    counts = target != ignored
    # Before the reductions, where warps wait for each other: later another one may have written over it.
    own = tl.load(logits + tl.where(counts, target, 0)).to(tl.float32)
    peak, norm = float("-inf"), 0.0
    for first in range(0, vocab, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 0))
        norm = norm * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
    lse = peak + tl.log(norm)
    tl.store(losses + row, tl.where(counts, lse - own, 0.0))
    factor = tl.where(counts, scale, 0.0)
    for first in range(0, vocab, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        slope = (tl.exp(x - lse) - tl.where(column == target, 1.0, 0.0)) * factor
        tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=column < vocab)


def losses_and_slopes(logits_CV: Tensor, targets_C: Tensor, scale: float = 1.0) -> Tensor:
    """Each token's loss in nats, fp32 [C]; the logits become ``scale`` times their gradient. Both are contiguous."""
    C, V = logits_CV.shape
    losses_C = logits_CV.new_empty(C, dtype=torch.float32)
    columns = min(COLUMNS, triton.next_power_of_2(V))
    _rows[C,](logits_CV, targets_C, losses_C, V, IGNORE, scale, COLUMNS=columns, num_warps=8)
    return losses_C


def linear_cross_entropy_sum(
    h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, *, chunk_tokens: int = CHUNK_TOKENS, scale: float = 1.0
) -> Tensor:
    """Nats, summed over the valid targets: fp32, a scalar. Gradients, times ``scale``, reach ``h_TD`` and the weight.

    They are computed going forward, where a chunk's logits are at hand. The weight's is summed in fp32, rounded once.
    """
    loss = _Loss.apply(h_TD, weight_VD, targets_T, chunk_tokens, scale)
    return cast(Tensor, loss)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        chunk_tokens: int,
        scale: float,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=h_TD.device)
        dh_TD, dweight_VD = torch.empty_like(h_TD), torch.zeros_like(weight_VD, dtype=torch.float32)
        for first in range(0, len(h_TD), chunk_tokens):
            at = slice(first, first + chunk_tokens)
            slopes_CV = h_TD[at] @ weight_VD.t()
            loss += losses_and_slopes(slopes_CV, targets_T[at], scale).sum()
            torch.mm(slopes_CV, weight_VD, out=dh_TD[at])
            _add_product(dweight_VD, slopes_CV.t(), h_TD[at])
        ctx.save_for_backward(dh_TD, dweight_VD)
        ctx.dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dh_TD, dweight_VD = ctx.saved_tensors
        return (dh_TD.float() * grad).to(dh_TD.dtype), (dweight_VD * grad).to(ctx.dtype), None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, in fp32; where kernels are interpreted there is a CPU, which has no such product."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))

"""Cross entropy as a sum over the targets that count.

Nothing here divides. The one divisor of a step, the valid tokens of its whole global batch, is known before
the step begins; so any split of the batch gives the same gradient.

    B  sequences      V  vocabulary
    S  positions      T  tokens: B · S in a row
    D  width          C  the tokens of one chunk
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from superstep.kernels import cross_entropy as kernel
from superstep.kernels.product import by_fp32, linear, product_into
from superstep.numerics.product import add_product

IGNORE = -100
"""The target of a position that does not count: padding, a prompt."""

CHUNK_TOKENS = 512
"""Each chunk is a pass over the weight's gradient, so small ones are slow: forward and backward of 1024
tokens in bf16 at V = 32000, D = 512 took 1.12, 0.69, 0.52 s at 64, 128, 256; from 512 on, as unchunked."""


TokenTerms = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""The log-probabilities of some tokens, and which they are, to the loss of each and its derivative by them."""

RowTerms = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The same of tokens that are known."""


def own_columns(columns: int, place: int, vocab: int) -> int:
    """Of the ``columns`` that the ``place``-th equal part of a padded vocabulary has, those in the vocabulary."""
    return max(0, min(columns, vocab - place * columns))


def cross_entropy_sum(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Nats, summed over the valid targets: a scalar, computed in fp32 whatever the dtype of the logits."""
    logits_TV, targets_T = logits_BSV.flatten(0, -2).float(), targets_BS.flatten()
    return F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy_sum(  # noqa: PLR0913
    h_BSD: Tensor,
    weight_VD: Tensor,
    targets_BS: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    scale: float = 1.0,
    weight_grad_into: Tensor | None = None,
    terms: TokenTerms | None = None,
    is_compiled: bool = False,
) -> Tensor:
    """``cross_entropy_sum(h · weightᵀ)`` with no more than a chunk of the logits in memory (Hsu 2024).

    Products are in the dtype of ``h`` and ``weight``; the softmax and the sums over chunks are fp32. Where a
    gradient is asked for, the forward computes it while a chunk's logits are at hand, and the backward only
    multiplies it by the incoming gradient. The weight's gradient leaves here as fp32: autograd rounds it to
    the weight's dtype, or keeps it where ``weight.grad_dtype`` is ``torch.float32``.

    Args:
        chunk_tokens: rows of logits that exist at once.
        scale: multiplies the gradients, not the loss.
        weight_grad_into: fp32 [V, D]. The weight's gradient is added to it **in the forward**, and autograd
            gets none: the incoming gradient must then be 1, its factor given as ``scale``.
        terms: another loss of each token than -logp. A token without a target has none, and no derivative.
        is_compiled: whether ``kernels.cross_entropy`` computes rows, of ``terms`` without a gradient too: the
            log-probability of a token has the same bits in both.
    """
    h_TD, targets_T = h_BSD.flatten(0, -2), targets_BS.flatten()
    if torch.is_grad_enabled() and (h_BSD.requires_grad or weight_VD.requires_grad):
        loss = _LinearCrossEntropySum.apply(  # type: ignore[no-untyped-call]
            h_TD, weight_VD, targets_T, chunk_tokens, scale, weight_grad_into, terms, is_compiled
        )
        return cast(Tensor, loss)
    if terms is not None:
        return _linear_terms_sum(h_TD, weight_VD, targets_T, chunk_tokens, terms, is_compiled=is_compiled)
    chunks = zip(h_TD.split(chunk_tokens), targets_T.split(chunk_tokens), strict=True)
    return torch.stack([cross_entropy_sum(F.linear(h_CD, weight_VD), targets) for h_CD, targets in chunks]).sum()


def _linear_terms_sum(
    h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk_tokens: int, terms: TokenTerms, *, is_compiled: bool
) -> Tensor:
    """The sum where no gradient is asked for."""
    loss = torch.zeros((), dtype=torch.float32, device=h_TD.device)
    for first in range(0, len(h_TD), chunk_tokens):
        at = slice(first, first + chunk_tokens)
        logits_CV = linear(h_TD[at], weight_VD)
        if is_compiled and kernel.takes(logits_CV):
            lse_C, score_C = kernel.row_sums(logits_CV, targets_T[at], logits_CV.shape[1])
            logp_C = score_C - lse_C
        else:
            target_C1 = targets_T[at].unsqueeze(-1)
            logp_CV = F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
            logp_C = logp_CV.gather(-1, target_C1.masked_fill(target_C1 == IGNORE, 0)).squeeze(-1)
        loss += terms(logp_C, at)[0].sum()
    return loss


def _rows_by_torch(logits_CV: Tensor, targets_C: Tensor, terms: RowTerms | None) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the gradient of their sum by the logits: fp32. Without ``terms``, what a row without a
    target has for a gradient does not matter.
    """
    ignored_C1 = (targets_C == IGNORE).unsqueeze(-1)
    target_C1 = targets_C.unsqueeze(-1).masked_fill(ignored_C1, 0)
    logp_CV = F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
    logp_C1, slope_C = logp_CV.gather(-1, target_C1), None
    if terms is None:
        loss_C = -logp_C1.masked_fill_(ignored_C1, 0.0)
    else:
        loss_C, slope_C = terms(logp_C1.squeeze(-1))
    # A row's gradient is softmax - onehot, times minus the derivative.
    dlogits_CV = logp_CV.exp_()
    dlogits_CV.scatter_add_(-1, target_C1, dlogits_CV.new_full(target_C1.shape, -1.0))
    return loss_C, dlogits_CV if slope_C is None else dlogits_CV.mul_(slope_C.neg().unsqueeze(-1))


def _rows_by_kernel(logits_CV: Tensor, targets_C: Tensor, terms: RowTerms | None) -> tuple[Tensor, Tensor]:
    """The same; gradients take the place of the logits, in their dtype."""
    columns = logits_CV.shape[1]
    lse_C, score_C = kernel.row_sums(logits_CV, targets_C, columns)
    if terms is None:
        counts_C = targets_C != IGNORE
        loss_C, factor_C = (lse_C - score_C).where(counts_C, 0.0), counts_C.float()
    else:
        loss_C, slope_C = terms(score_C - lse_C)
        factor_C = -slope_C
    kernel.row_gradients_(logits_CV, targets_C, columns, lse_C, factor_C)
    return loss_C, logits_CV


def _at(terms: TokenTerms, at: slice, logp_C: Tensor) -> tuple[Tensor, Tensor]:
    return terms(logp_C, at)


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: FunctionCtx,
        h_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        chunk_tokens: int,
        scale: float,
        weight_grad_into: Tensor | None,
        terms: TokenTerms | None,
        is_compiled: bool,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=h_TD.device)
        dh_TD = torch.empty_like(h_TD)
        dweight_VD = weight_grad_into
        if dweight_VD is None and weight_VD.requires_grad:
            dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        chunks = (x.split(chunk_tokens) for x in (h_TD, targets_T, dh_TD))
        for number, (h_CD, targets_C, dh_CD) in enumerate(zip(*chunks, strict=True)):
            ignored_C1 = (targets_C == IGNORE).unsqueeze(-1)
            # Rows that do not count are cleared before and after, where they are D wide, not V.
            h_CD = h_CD.masked_fill(ignored_C1, 0.0)
            logits_CV, at = linear(h_CD, weight_VD), slice(number * chunk_tokens, (number + 1) * chunk_tokens)
            rows = _rows_by_kernel if is_compiled and kernel.takes(logits_CV) else _rows_by_torch
            loss_C, dlogits_CV = rows(logits_CV, targets_C, None if terms is None else partial(_at, terms, at))
            loss += loss_C.sum()
            if not by_fp32(dlogits_CV, weight_VD):
                dlogits_CV = dlogits_CV.to(h_TD.dtype)
            product_into(dh_CD, dlogits_CV, weight_VD, scale).masked_fill_(ignored_C1, 0.0)
            if dweight_VD is not None:
                add_product(dweight_VD, dlogits_CV.t(), h_CD, scale)
        # Torch saves a None as gladly as a tensor; its annotation does not say so.
        ctx.save_for_backward(dh_TD, dweight_VD if weight_grad_into is None else None)  # type: ignore[arg-type]
        return loss

    @staticmethod
    def backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor | None, ...]:
        dh_TD, dweight_VD = cast("tuple[Tensor, Tensor | None]", ctx.saved_tensors)
        dweight_VD = None if dweight_VD is None else dweight_VD * grad
        return (dh_TD.float() * grad).to(dh_TD.dtype), dweight_VD, None, None, None, None, None, None

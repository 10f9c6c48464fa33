"""Cross entropy as a sum over the targets that count.

Nothing here divides. A step's only divisor, the valid tokens of its whole global batch, is known before the step
begins; so any split of the batch gives the same gradient.

    B  sequences      V  vocabulary
    S  positions      T  tokens: B · S in a row
    D  width          C  the tokens of one chunk
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from superstep.kernels import cross_entropy as kernel
from superstep.kernels.product import by_fp32, linear, product_into
from superstep.numerics.accumulate_product import add_product
from superstep.numerics.soft_cap import soft_cap, soft_cap_slope_, tanh_for

IGNORE = -100
"""The target of a position that does not count: padding, a prompt."""

CHUNK_TOKENS = 512
"""Each chunk is a pass over the weight's gradient, so small ones are slow: forward and backward of 1024 tokens in bf16
at V = 32000, D = 512 took 1.12, 0.69, 0.52 s at 64, 128, 256; from 512 on, the same as without chunks.
"""


TokenTerms = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""From the log-probabilities and places of some tokens to each one's loss and its derivative."""


@dataclass(frozen=True, slots=True)
class VocabularyColumns:
    """The vocabulary columns of a rank's logits, where ranks share the vocabulary.

    Attributes:
        count: those in the vocabulary; later columns are padding without probability.
        over_ranks: from each row's log-sum-exp and target logit in these columns to those over all ranks.
    """

    first: int
    count: int
    over_ranks: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class SmoothedCrossEntropy:
    """A loss for the last unit of a user's model: the cross entropy of logits [..., C] and class numbers [...], with a
    ``share`` of each target spread over all classes (label smoothing, Szegedy 2016). Validation has an accuracy.
    """

    share: float

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum over targets that count."""
        return F.cross_entropy(
            logits.flatten(0, -2).float(),
            targets.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.share,
        )


def own_columns(columns: int, place: int, vocab: int) -> int:
    """How many columns of the ``place``-th equal part of a padded vocabulary are in the vocabulary."""
    return max(0, min(columns, vocab - place * columns))


def cross_entropy_sum(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Nats, summed over the valid targets: a scalar, computed in fp32 for any dtype of the logits."""
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
    columns: VocabularyColumns | None = None,
    temperature: float = 1.0,
    logit_cap: float | None = None,
) -> Tensor:
    """``cross_entropy_sum(h · weightᵀ)`` with only one chunk of the logits in memory (Hsu 2024).

    Products are in the dtype of ``h`` and ``weight``; the softmax and the sums over chunks are fp32. If a gradient is
    needed, the forward computes it while a chunk's logits exist, and the backward only multiplies it by the incoming
    gradient. The weight's gradient is fp32 here: autograd rounds it to the weight's dtype, or keeps it where
    ``weight.grad_dtype`` is ``torch.float32``.

    Args:
        chunk_tokens: rows of logits that exist at once.
        scale: multiplies the gradients, not the loss.
        weight_grad_into: fp32 [V, D]. The weight's gradient is added to it **in the forward**, and autograd gets none:
            the
        incoming gradient must then be 1, its factor given as ``scale``.
        terms: another loss of each token than -logp. A token without a target has none, and no derivative.
        is_compiled: whether ``kernels.cross_entropy`` computes rows, also without a gradient: the log-probability of a
        token has the same bits in both.
        columns: of ``weight``, where other ranks have others; the gradient of ``h`` is then this rank's share.
        temperature: divides the logits.
        logit_cap: before that a logit x becomes logit_cap · tanh(x / logit_cap); None leaves it.
    """
    h_TD, targets_T = h_BSD.flatten(0, -2), targets_BS.flatten()
    columns = columns or VocabularyColumns(0, len(weight_VD), _alone)
    rows = _Rows(is_compiled=is_compiled, columns=columns, temperature=temperature, logit_cap=logit_cap)
    if torch.is_grad_enabled() and (h_BSD.requires_grad or weight_VD.requires_grad):
        loss = _LinearCrossEntropySum.apply(  # type: ignore[no-untyped-call]
            h_TD, weight_VD, targets_T, chunk_tokens, scale, weight_grad_into, terms, rows
        )
        return cast(Tensor, loss)
    loss = torch.zeros((), dtype=torch.float32, device=h_TD.device)
    for at in _chunks(len(h_TD), chunk_tokens):
        lse_C, score_C = rows.sums(rows.cap(linear(h_TD[at], weight_VD)), targets_T[at])
        loss += _losses(score_C - lse_C, targets_T, terms, at)[0].sum()
    return loss


def cut_cross_entropy_sum(
    logits_BSV: Tensor, targets_BS: Tensor, columns: VocabularyColumns, terms: TokenTerms | None = None
) -> Tensor:
    """``cross_entropy_sum`` where each rank has some columns of the logits (Shoeybi 2019, sec. 3)."""
    logits_TV, targets_T = logits_BSV.flatten(0, -2), targets_BS.flatten()
    rows = _Rows(is_compiled=False, columns=columns)
    loss = _CrossEntropySum.apply(logits_TV, targets_T, terms, rows)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


def _alone(lse_C: Tensor, score_C: Tensor) -> tuple[Tensor, Tensor]:
    return lse_C, score_C


def _chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(first, first + chunk_tokens) for first in range(0, tokens, chunk_tokens)]


def _losses(logp_C: Tensor, targets_T: Tensor, terms: TokenTerms | None, at: slice) -> tuple[Tensor, Tensor]:
    """Each token's loss, and minus its derivative by the log-probability."""
    if terms is not None:
        loss_C, slope_C = terms(logp_C, at)
        return loss_C, -slope_C
    counts_C = targets_T[at] != IGNORE
    return -logp_C.where(counts_C, 0.0), counts_C.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """How rows of logits are computed, and which columns they have."""

    is_compiled: bool
    columns: VocabularyColumns
    temperature: float = 1.0
    logit_cap: float | None = None

    def cap(self, logits_CV: Tensor) -> Tensor:
        """The logits that ``sums`` and ``gradients_`` take: capped, in fp32, if there is a cap."""
        return logits_CV if self.logit_cap is None else soft_cap(logits_CV.float(), self.logit_cap, tanh_for(logits_CV))

    def sums(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's log-sum-exp and target logit, over all ranks: fp32."""
        columns, here_C = self.columns, targets_C - self.columns.first
        if self._in_kernel(logits_CV):
            return columns.over_ranks(*kernel.row_sums(logits_CV, here_C, columns.count, self.temperature))
        return columns.over_ranks(*kernel.reference(logits_CV.float(), here_C, columns.count, self.temperature))

    def gradients_(self, logits_CV: Tensor, targets_C: Tensor, lse_C: Tensor, factor_C: Tensor) -> Tensor:
        """The gradients of the factors' sum with the losses; may overwrite the logits."""
        given = targets_C - self.columns.first, self.columns.count, lse_C, factor_C, self.temperature
        if self.logit_cap is not None:
            gradients_CV = kernel.reference_gradients(logits_CV, *given)
            return gradients_CV.mul_(soft_cap_slope_(logits_CV, self.logit_cap))
        if self._in_kernel(logits_CV):
            kernel.row_gradients_(logits_CV, *given)
            return logits_CV
        return kernel.reference_gradients(logits_CV, *given)

    def _in_kernel(self, logits_CV: Tensor) -> bool:
        return self.is_compiled and self.logit_cap is None and kernel.takes(logits_CV)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits_TV: Tensor,
        targets_T: Tensor,
        terms: TokenTerms | None,
        rows: _Rows,
    ) -> Tensor:
        lse_T, score_T = rows.sums(logits_TV, targets_T)
        loss_T, factor_T = _losses(score_T - lse_T, targets_T, terms, slice(None))
        ctx.save_for_backward(logits_TV, targets_T, lse_T, factor_T)
        ctx.rows = rows
        return loss_T.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        logits_TV, targets_T, lse_T, factor_T = ctx.saved_tensors
        return ctx.rows.gradients_(logits_TV, targets_T, lse_T, grad * factor_T).to(logits_TV.dtype), None, None, None


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
        rows: _Rows,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=h_TD.device)
        dh_TD = torch.empty_like(h_TD)
        dweight_VD = weight_grad_into
        if dweight_VD is None and weight_VD.requires_grad:
            dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        for at in _chunks(len(h_TD), chunk_tokens):
            targets_C = targets_T[at]
            ignored_C1 = (targets_C == IGNORE).unsqueeze(-1)
            # Rows that do not count are cleared before and after, where they are D wide, not V.
            h_CD = h_TD[at].masked_fill(ignored_C1, 0.0)
            logits_CV = rows.cap(linear(h_CD, weight_VD))
            lse_C, score_C = rows.sums(logits_CV, targets_C)
            loss_C, factor_C = _losses(score_C - lse_C, targets_T, terms, at)
            loss += loss_C.sum()
            dlogits_CV = rows.gradients_(logits_CV, targets_C, lse_C, factor_C)
            if not by_fp32(dlogits_CV, weight_VD):
                dlogits_CV = dlogits_CV.to(h_TD.dtype)
            product_into(dh_TD[at], dlogits_CV, weight_VD, scale).masked_fill_(ignored_C1, 0.0)
            if dweight_VD is not None:
                add_product(dweight_VD, dlogits_CV.t(), h_CD, scale)
            del logits_CV, dlogits_CV  # they would be there beside the next chunk's
        # Torch saves a None as gladly as a tensor; its annotation does not say so.
        ctx.save_for_backward(dh_TD, dweight_VD if weight_grad_into is None else None)  # type: ignore[arg-type]
        return loss

    @staticmethod
    def backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor | None, ...]:
        dh_TD, dweight_VD = cast("tuple[Tensor, Tensor | None]", ctx.saved_tensors)
        dweight_VD = None if dweight_VD is None else dweight_VD * grad
        return (dh_TD.float() * grad).to(dh_TD.dtype), dweight_VD, None, None, None, None, None, None

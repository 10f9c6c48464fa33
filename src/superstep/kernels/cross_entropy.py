"""Rows of logits to log-sum-exp and the target's logit, and to gradients: what that is, and the kernel for a CPU.

C  rows    V  columns
"""

from __future__ import annotations

import torch
from torch import Tensor

from superstep.kernels import fused


def reference(logits_CV: Tensor, targets_C: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Of each row the log-sum-exp of its first ``columns`` numbers, and the target's number; 0 where it has none.

    Their difference is the target's log-probability; its gradient is [x is the target's] - e^(x - lse).
    """
    is_here_C = (targets_C >= 0) & (targets_C < columns)
    held_CV = logits_CV[:, :columns]
    score_C = held_CV.gather(1, targets_C.where(is_here_C, 0)[:, None])[:, 0].where(is_here_C, 0.0)
    return held_CV.logsumexp(1), score_C


def takes(logits_CV: Tensor) -> bool:
    """Whether the kernel computes it."""
    return fused.takes(logits_CV)


@torch.library.custom_op("superstep::row_sums", mutates_args=())
def row_sums(logits_CV: Tensor, targets_C: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """As ``reference``, by the kernel: fp32."""
    logits_CV, targets_C = logits_CV.contiguous(), targets_C.contiguous()
    lse_C, score_C = _empty_sums(logits_CV, targets_C, columns)
    rows, width = logits_CV.shape
    is_bf16 = logits_CV.dtype == torch.bfloat16
    fused.run("row_sums", is_bf16, logits_CV, rows, columns, width, targets_C, lse_C, score_C)
    return lse_C, score_C


@row_sums.register_fake
def _empty_sums(logits_CV: Tensor, targets_C: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    lse_C = logits_CV.new_empty(len(logits_CV), dtype=torch.float32)
    return lse_C, torch.empty_like(lse_C)


@torch.library.custom_op("superstep::row_gradients_", mutates_args=("logits_CV",))
def row_gradients_(logits_CV: Tensor, targets_C: Tensor, columns: int, lse_C: Tensor, factor_C: Tensor) -> None:
    """Makes of the logits, in place, the gradients of the factors' sum with minus the log-probabilities.

    Args:
        logits_CV: contiguous; those behind ``columns`` become 0, as does a row whose factor is 0.
        targets_C: as in ``row_sums``.
        columns: that count.
        lse_C: of whole rows, where others hold parts of them.
        factor_C: fp32.
    """
    rows, width = logits_CV.shape
    is_bf16 = logits_CV.dtype == torch.bfloat16
    held = targets_C.contiguous(), lse_C.contiguous(), factor_C.contiguous()
    fused.run("row_gradients", is_bf16, logits_CV, rows, columns, width, *held)


@row_gradients_.register_fake
def _(logits_CV: Tensor, targets_C: Tensor, columns: int, lse_C: Tensor, factor_C: Tensor) -> None:
    return None

"""Rows of logits to log-sum-exp and the target's logit, and to gradients: reference and kernels.

C  rows    V  columns
"""

from __future__ import annotations

import torch
from torch import Tensor

from superstep.kernels import cpu_library, triton_loader


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature, fp32 or wider. The same bits for any split of rows, and on a GPU, where torch
    multiplies by one over a plain number instead of dividing.
    """
    if temperature == 1.0:
        return logits
    return logits / torch.full((1,), temperature, dtype=torch.float32, device=logits.device)


def reference(logits_CV: Tensor, targets_C: Tensor, columns: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Of each row the log-sum-exp of its first ``columns`` numbers over the temperature, and the target's number over
    it, or 0 without a target. Their difference is the target's log-probability.
    """
    logits_CV = apply_temperature(logits_CV, temperature)
    is_here_C = (targets_C >= 0) & (targets_C < columns)
    score_C = logits_CV.gather(1, targets_C.where(is_here_C, 0)[:, None])[:, 0].where(is_here_C, 0.0)
    if columns < logits_CV.shape[1]:
        logits_CV = logits_CV.where(torch.arange(logits_CV.shape[1], device=logits_CV.device) < columns, -torch.inf)
    return logits_CV.logsumexp(1), score_C


def reference_gradients(
    logits_CV: Tensor, targets_C: Tensor, columns: int, lse_C: Tensor, factor_C: Tensor, temperature: float = 1.0
) -> Tensor:
    """The gradient of the factors' sum with minus the log-probabilities, for logits x and the temperature t: factor / t
    · (e^(x/t - lse) - [x is the target's]), in the format of ``lse_C``; arguments as in ``row_gradients_``.
    """
    is_here_C = (targets_C >= 0) & (targets_C < columns)
    gradient_CV = (apply_temperature(logits_CV, temperature) - lse_C[:, None]).exp_()
    gradient_CV[:, columns:] = 0.0
    gradient_CV.scatter_add_(1, targets_C.where(is_here_C, 0)[:, None], -is_here_C.to(gradient_CV.dtype)[:, None])
    return gradient_CV.mul_(factor_C[:, None] / temperature)


def takes(logits_CV: Tensor) -> bool:
    """Whether the device's kernel computes it."""
    return (logits_CV.is_cuda and logits_CV.dtype in cpu_library.DTYPES) or cpu_library.takes(logits_CV)


@torch.library.custom_op("superstep::row_sums", mutates_args=())
def row_sums(logits_CV: Tensor, targets_C: Tensor, columns: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """``reference`` by the kernel: fp32."""
    logits_CV, targets_C = logits_CV.contiguous(), targets_C.contiguous()
    if logits_CV.is_cuda:
        sums: tuple[Tensor, Tensor] = triton_loader.module("cross_entropy").row_sums(
            logits_CV, targets_C, columns, temperature
        )
        return sums
    lse_C, score_C = _empty_sums(logits_CV, targets_C, columns)
    rows, width = logits_CV.shape
    is_bf16 = logits_CV.dtype == torch.bfloat16
    cpu_library.run("row_sums", is_bf16, logits_CV, rows, columns, width, targets_C, lse_C, score_C, temperature)
    return lse_C, score_C


@row_sums.register_fake
def _empty_sums(logits_CV: Tensor, targets_C: Tensor, columns: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    lse_C = logits_CV.new_empty(len(logits_CV), dtype=torch.float32)
    return lse_C, torch.empty_like(lse_C)


@torch.library.custom_op("superstep::row_gradients_", mutates_args=("logits_CV",))
def row_gradients_(
    logits_CV: Tensor, targets_C: Tensor, columns: int, lse_C: Tensor, factor_C: Tensor, temperature: float = 1.0
) -> None:
    """``reference_gradients`` by the kernel, in place of the logits and in their format.

    Args:
        logits_CV: contiguous; those after ``columns`` become 0, as does a row with factor 0.
        lse_C: of whole rows, where other ranks hold parts of them.
        factor_C: fp32.
    """
    targets_C, lse_C, factor_C = targets_C.contiguous(), lse_C.contiguous(), factor_C.contiguous()
    if logits_CV.is_cuda:
        gpu = triton_loader.module("cross_entropy")
        gpu.row_gradients_(logits_CV, targets_C, columns, lse_C, factor_C, temperature)
        return
    rows, width = logits_CV.shape
    is_bf16 = logits_CV.dtype == torch.bfloat16
    cpu_library.run("row_gradients", is_bf16, logits_CV, rows, columns, width, targets_C, lse_C, factor_C, temperature)


@row_gradients_.register_fake
def _(
    logits_CV: Tensor, targets_C: Tensor, columns: int, lse_C: Tensor, factor_C: Tensor, temperature: float = 1.0
) -> None:
    return None

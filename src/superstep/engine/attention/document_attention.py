"""Attention of whole sequences, and within documents: each document of a packed sequence as if it stood alone.

Each document is a triangle of scores, so a sequence of many documents costs less than one of few. Document starts are
read on the host, so that no GPU is waited for; for ``kernels.attention`` they may be on the GPU.

    B  sequences    N  query heads           S  positions    H  width of one head
                    K  key and value heads

An operator of torch's dispatcher, for the reasons that the ring is one (``engine.parallel.ring``): selective recompute
keeps its result, and a compiler, which would make another graph for every number of documents, sees one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.engine.parallel.flash_partial import attend_block, attend_block_backward
from superstep.engine.parallel.flash_varlen import attend_parts, attend_parts_backward, bounds
from superstep.kernels import attention as kernel
from superstep.kernels.position_bias import Bias, bias_of
from superstep.model.decoder import flash
from superstep.numerics.attention.attention_operator import connect_gradients, no_gradient
from superstep.numerics.attention.attention_sinks import join_sinks
from superstep.numerics.attention.blockwise_attention import attend_blockwise
from superstep.plan.model.attention_rule import PLAIN, AttentionRule


@dataclass(frozen=True, slots=True)
class DocumentAttend:
    """Causal attention of whole sequences, or within each of their documents, as ``model.decoder.Attend``.

    Attributes:
        starts: int64 [B, S], on the host, or on the device for ``kernels.attention``: for each position, the start of
            its document within the row; None for one document in each row.
        is_compiled: whether ``kernels.attention`` computes it, where it supports the heads and the rule.
    """

    starts: Tensor | None = None
    is_compiled: bool = False

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        rule: AttentionRule = PLAIN,
        bias: Bias | None = None,
        sinks_BSN: Tensor | None = None,
    ) -> Tensor:
        """The attention output: [B, S, N, H]."""
        qkv, window = (q_BSNH, k_BSKH, v_BSKH), rule.window_in(q_BSNH.shape[1])
        tensor = None if bias is None else bias.tensor
        out_BSNH: Tensor
        if rule.soft_cap is not None or not (bias is None or self._has_kernel(bias, qkv)):
            return attend_blockwise(
                *qkv, window=window, soft_cap=rule.soft_cap, bias=tensor, starts_BS=self.starts, sinks_BSN=sinks_BSN
            )
        if window is None:
            out_BSNH = document_attention(*qkv, self.starts, tensor, sinks_BSN, self.is_compiled)[0]
            return out_BSNH
        if self.is_compiled and kernel.fits(*qkv):
            whole = (x.contiguous() for x in qkv)  # contiguous, as the kernel needs
            starts_BS = self._starts_in(window, q_BSNH)
            out_BSNH = document_attention(*whole, starts_BS, tensor, sinks_BSN, True)[0]  # noqa: FBT003
            return out_BSNH
        if self.starts is None:
            return flash(*qkv, rule, None, sinks_BSN)
        return attend_blockwise(*qkv, window=window, starts_BS=self.starts, sinks_BSN=sinks_BSN)

    def _has_kernel(self, bias: Bias, qkv: tuple[Tensor, Tensor, Tensor]) -> bool:
        return self.is_compiled and kernel.adds(bias) and kernel.fits(*qkv)

    def _starts_in(self, window: int, q_BSNH: Tensor) -> Tensor:
        """The first key that each query sees, [B, S]: its window's, or its document's within that."""
        B, S = q_BSNH.shape[:2]
        places = torch.arange(S, device=q_BSNH.device)
        starts_BS = (places - (window - 1)).clamp_(min=0).expand(B, S)
        return starts_BS if self.starts is None else torch.maximum(starts_BS, self.starts.to(q_BSNH.device))


@torch.library.custom_op("superstep::document_attention", mutates_args=())
def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    is_compiled: bool,
) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, H] and its log-sum-exp [B, N, S], fp32. Only kernels that ``adds`` names have a bias."""
    qkv = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if is_compiled and kernel.takes(*qkv):
        added = None if bias is None else bias_of(bias)
        out_BNSH, lse = kernel.attend(*qkv, is_causal=True, starts_BS=starts, bias=added)
    elif starts is None:
        out_BNSH, lse = attend_block(*qkv, is_causal=True)
    else:
        out_BNSH, lse = attend_parts(*qkv, bounds(starts.cpu()))
    return join_sinks(out_BNSH.transpose(1, 2).contiguous(), lse.contiguous(), sinks)


@torch.library.custom_op("superstep::document_attention_backward", mutates_args=())
def _document_attention_backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    bias: Tensor | None,
    is_compiled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the bias."""
    grad_BNSH, out_BNSH = grad.transpose(1, 2), out.transpose(1, 2)
    qkv = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if is_compiled and kernel.takes(*qkv, grad_BNSH, out_BNSH):
        added = None if bias is None else bias_of(bias)
        gradients = kernel.attend_backward(grad_BNSH, qkv, out_BNSH, lse, is_causal=True, starts_BS=starts, bias=added)
    elif starts is None:
        gradients = attend_block_backward(grad_BNSH, qkv, out_BNSH, lse, is_causal=True)
    else:
        gradients = attend_parts_backward(grad_BNSH, qkv, out_BNSH, lse, bounds(starts.cpu()))
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in gradients)
    return dq, dk, dv, no_gradient(q) if bias is None else torch.zeros_like(bias)


connect_gradients(document_attention, _document_attention_backward)

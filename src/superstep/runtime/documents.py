"""Attention within documents: a packed sequence's documents side by side, each as if it stood alone.

What is computed is a triangle for each document, so a sequence of many costs less than one of few, and no mask is ever
made. Where documents start is read off the host's memory: a GPU is not waited for.

    B  sequences    N  query heads           S  positions    H  width of one head
                    K  key and value heads

An operator of torch's dispatcher, for the reasons that the ring is one (``runtime.parallel.ring``): selective recompute
keeps its result, and a compiler, which would make another graph for every number of documents, sees one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from superstep.runtime.parallel.flash_parts import attend_parts, attend_parts_backward, bounds


@dataclass(frozen=True, slots=True)
class DocumentAttend:
    """Causal attention within each document of whole sequences, as ``model.decoder.Attend``.

    Attributes:
        starts: int64 [B, S] on the host: for each position, where in its row its document starts.
    """

    starts: Tensor

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        """The mixed values: [B, S, N, H]."""
        out_BSNH: Tensor = document_attention(q_BSNH, k_BSKH, v_BSKH, self.starts)[0]
        return out_BSNH


@torch.library.custom_op("superstep::document_attention", mutates_args=())
def document_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, H] and its log-sum-exp [B, N, S], fp32."""
    q_BNSH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in (q, k, v))
    out_BNSH, lse = attend_parts(q_BNSH, k_BKSH, v_BKSH, bounds(starts))
    return out_BNSH.transpose(1, 2).contiguous(), lse


@torch.library.custom_op("superstep::document_attention_backward", mutates_args=())
def _document_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    grad_BNSH, q_BNSH, k_BKSH, v_BKSH, out_BNSH = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    found = attend_parts_backward(grad_BNSH, (q_BNSH, k_BKSH, v_BKSH), out_BNSH, lse, bounds(starts))
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in found)
    return dq, dk, dv


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    B, S, N, _ = q.shape
    return _empty(q), q.new_empty(B, N, S, dtype=torch.float32)


@_document_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q), _empty(k), _empty(v)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    q, k, v, starts = inputs
    ctx.save_for_backward(q, k, v, *output, starts)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: ANN401
    dq, dk, dv = _document_attention_backward(grad.contiguous(), *ctx.saved_tensors)
    return dq, dk, dv, None


document_attention.register_autograd(_backward, setup_context=_keep)

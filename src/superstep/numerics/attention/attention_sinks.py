"""Sinks of attention: a score of each head that joins the softmax of every query, without a value (gpt-oss).

With p the softmax over the keys and the sink, out = Σ over keys of p · v. So a sink needs no kernel of its own: the
output and the log-sum-exp (lse) of the keys alone give those with the sink, and the backward pass of any kernel that
takes both computes the gradients of queries, keys and values. Where keys come in parts, the sink joins once, after the
last part.

    share = exp(lse) / (exp(lse) + exp(sink)),   out' = share · out,   lse' = log(exp(lse) + exp(sink))
    dsink = -exp(sink - lse') · Σ over H of dout' · out'

    B  sequences    S  queries    N  query heads    H  width of one head
"""

from __future__ import annotations

import torch
from torch import Tensor

from superstep.kernels.invariant import row_sum


def join_sinks(out_BSNH: Tensor, lse_BNS: Tensor, sinks_BSN: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output and lse with the sinks in the softmax; as they are without sinks.

    Exponential, logarithm and division of contiguous fp32: an element's bits do not depend on its place.
    """
    if sinks_BSN is None:
        return out_BSNH, lse_BNS
    sinks_BNS = sinks_BSN.transpose(1, 2).float().contiguous()
    largest = torch.maximum(lse_BNS, sinks_BNS)
    of_keys = (lse_BNS - largest).exp_()
    total = of_keys + (sinks_BNS - largest).exp_()
    share_BSN1 = (of_keys / total).transpose(1, 2).unsqueeze(-1)
    return (out_BSNH * share_BSN1).to(out_BSNH.dtype), largest.add_(total.log_())


def sinks_gradient(grad_BSNH: Tensor, out_BSNH: Tensor, lse_BNS: Tensor, sinks_BSN: Tensor) -> Tensor:
    """The gradient of the sinks, [B, S, N], from the output and lse with them."""
    dsinks: Tensor = _sinks_gradient(grad_BSNH, out_BSNH, lse_BNS, sinks_BSN)
    return dsinks


@torch.library.custom_op("superstep::sinks_gradient", mutates_args=())
def _sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    delta_BSN = row_sum(grad.float() * out.float()).squeeze(-1)
    share_BSN = (sinks.float() - lse.transpose(1, 2)).contiguous().exp_()
    return (share_BSN * delta_BSN).neg_().to(sinks.dtype)


@_sinks_gradient.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return torch.empty_like(sinks, memory_format=torch.contiguous_format)

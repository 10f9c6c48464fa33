"""Stack: a training software's effect on a step's seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.hardware.units import Array

ATTENTION = ("eager", "fused-softmax", "flash-1", "flash-2", "flash-3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A software's properties; arrays of one shape are as many softwares.

    Attributes:
        attention: index into ``ATTENTION``; the first two keep the scores.
        has_fused_norms, has_fused_elementwise: 1 where a norm, and what follows a product, are one kernel each.
        has_fused_loss: 1 where the logits are never whole.
        is_eight_bit: 1 where linear layers multiply in 8 bits or fewer.
        gradient_bytes: of a gradient when it is reduced.
        kept_gradient_bytes: of a gradient when it is accumulated.
        bucket_bytes: the largest piece of gradients and parameters over the data-parallel ranks.
        overlap_shards: overlapped share of the traffic of ZeRO 3.
        overlap_data: of the gradients' reduction, and of the gathers of ZeRO 1 and 2.
        overlap_tensor: of the tensor-parallel traffic.
        overlap_pipeline: of the transfers between stages.
        eager: bytes of unfused operations over those of their definition.
        overlap_experts: overlapped share of the exchange of experts' tokens.
        balances_context: 1 where context-parallel ranks have early and late tokens, so that each does as much.
        sends_once: 1 where a token goes once to a domain, even with several of its experts there.
    """

    attention: Array
    has_fused_norms: Array
    has_fused_elementwise: Array
    has_fused_loss: Array
    is_eight_bit: Array
    gradient_bytes: Array
    kept_gradient_bytes: Array
    bucket_bytes: Array
    overlap_shards: Array
    overlap_data: Array
    overlap_tensor: Array
    overlap_pipeline: Array
    overlap_experts: Array
    eager: Array
    balances_context: Array
    sends_once: Array

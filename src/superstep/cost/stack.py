"""Stack: what a training software does, as far as it changes a step's seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.cost.decoder import Array, array

ATTENTION = ("eager", "fused-softmax", "flash-1", "flash-2", "flash-3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What the software does; arrays of one shape are as many of them.

    Attributes:
        attention: index into ``ATTENTION``; the first two keep the scores.
        has_fused_norms, has_fused_elementwise: 1 where a norm, and what follows a product, are one kernel each.
        has_fused_loss: 1 where the logits are never whole.
        is_eight_bit: 1 where linear layers multiply in 8 bits or fewer.
        gradient_bytes: of a gradient as it is reduced.
        kept_gradient_bytes: of a gradient as it is accumulated.
        overlap_data: share of the data-parallel traffic that may run beside compute.
        overlap_tensor: share of the tensor-parallel traffic that may.
        overlap_pipeline: share of the transfers between stages that may.
    """

    attention: Array
    has_fused_norms: Array
    has_fused_elementwise: Array
    has_fused_loss: Array
    is_eight_bit: Array
    gradient_bytes: Array
    kept_gradient_bytes: Array
    overlap_data: Array
    overlap_tensor: Array
    overlap_pipeline: Array


def superstep(*, is_eight_bit: bool = False, has_fused_kernels: bool = False) -> Stack:
    """What Superstep itself does: eager kernels or compiled ones, a loss in chunks, gradients reduced in fp32."""
    fused = array(has_fused_kernels)
    return Stack(
        attention=array(ATTENTION.index("flash-2")),
        has_fused_norms=fused,
        has_fused_elementwise=fused,
        has_fused_loss=array(1),
        is_eight_bit=array(is_eight_bit),
        gradient_bytes=array(4),
        kept_gradient_bytes=array(4),
        overlap_data=array(0.8),
        overlap_tensor=array(0),
        overlap_pipeline=array(0.6),
    )

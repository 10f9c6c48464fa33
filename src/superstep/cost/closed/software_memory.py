"""Keeping: what a training software holds in memory, as far as it does not change the seconds.

Two softwares with the same kernels differ here: whether a split sequence is gathered again for the backward pass,
whether 16-bit weights stay beside their masters, how many copies of the logits a loss makes.
"""

from __future__ import annotations

from dataclasses import dataclass

from superstep.cost.closed.decoder_size import array
from superstep.hardware.units import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What is kept; arrays of one shape are as many of them.

    Attributes:
        element_bytes: of a number in the forward pass.
        input_bytes: of a number that a product reads, as it is kept where products are in 8 bits.
        weight_shard_bytes: of a parameter that stays beside its fp32 master with ZeRO 3.
        update_bytes: of what the update makes and drops, for each parameter that it updates.
        bucket_bytes: of buffers in which ZeRO 2 and 3 collect gradients, beside a unit's own.
        logit_bytes: of a logit at the loss's peak, all its copies together.
        norm_bytes: of what a norm that is no one kernel keeps of each number, over a fused one: its quotient in 16
            bits, and its input in fp32 in the place of 16 bits where it computes there.
        gathers_logits: 1 where tensor-parallel ranks gather the logits before the loss.
        keeps_gathered: 1 where a split sequence stays gathered for the backward pass (0: is gathered again).
        repeats_shared: 1 where each tensor-parallel rank holds the router and the experts that all tokens visit whole,
            0 where these are cut.
        weighs_head: 1 where stages are even in work, the head's with it, 0 where they are even in layers.
        selects_products: share of the products whose results selective recomputation keeps, beside attention's; 0 where
            it drops the scores alone.
    """

    element_bytes: Array
    input_bytes: Array
    weight_shard_bytes: Array
    update_bytes: Array
    bucket_bytes: Array
    logit_bytes: Array
    norm_bytes: Array
    gathers_logits: Array
    keeps_gathered: Array
    repeats_shared: Array
    weighs_head: Array
    selects_products: Array


def superstep(*, element_bytes: int = 2) -> Keeping:
    """What Superstep itself keeps: its norms are one function, its gathered sequences stay."""
    return Keeping(
        element_bytes=array(element_bytes),
        input_bytes=array(element_bytes),
        # In fp32 the master weights are all there are.
        weight_shard_bytes=array(4 if element_bytes == 4 else 0),
        update_bytes=array(0),
        bucket_bytes=array(0),
        logit_bytes=array(4 + element_bytes),
        norm_bytes=array(0),
        gathers_logits=array(0),
        keeps_gathered=array(1),
        repeats_shared=array(1),
        weighs_head=array(1),
        selects_products=array(1),
    )


def megatron() -> Keeping:
    """Megatron-LM: a split sequence gathered again, a vocabulary-parallel loss in fp32, 8-bit inputs kept in 8 bits."""
    return Keeping(
        element_bytes=array(2),
        input_bytes=array(1),
        weight_shard_bytes=array(2),
        update_bytes=array(0),
        bucket_bytes=array(0),
        logit_bytes=array(10),
        norm_bytes=array(0),
        gathers_logits=array(0),
        keeps_gathered=array(0),
        repeats_shared=array(0),
        weighs_head=array(0),
        selects_products=array(0),
    )

"""KeptMemory: what a training software holds in memory, without effect on the seconds.

Software with the same kernels may differ here: whether a split sequence is gathered again for the backward pass,
whether 16-bit weights stay beside their masters, how many copies of the logits a loss makes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from superstep.cost.closed.model_numbers import array
from superstep.hardware.units import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMemory:
    """What is kept; arrays of one shape are as many of them.

    Attributes:
        element_bytes: of a number in the forward pass.
        input_bytes: of a number that a product reads, as it is kept where products are in 8 bits.
        weight_shard_bytes: of a parameter that stays beside its fp32 master with ZeRO 3.
        update_bytes: of what the update makes in one piece and drops, for each updated parameter. It does not fit into
            gaps that activations left, so it is added.
        listed_bytes: of what it makes tensor by tensor, which fits there.
        moments: fp32 numbers that the optimizer keeps beside each parameter.
        masters: fp32 master weights beside each narrower one, 0 or 1.
        bucket_bytes: of buffers in which ZeRO 2 and 3 collect gradients, beside a unit's own.
        logit_bytes: of a logit at the loss's peak, all its copies together.
        norm_bytes: of what a norm that is no one kernel keeps of each number, over a fused one: its quotient in 16
            bits, and its input in fp32 in the place of 16 bits where it computes there.
        gathers_logits: 1 where tensor-parallel ranks gather the logits before the loss.
        chunks_cut_head: 1 where a fused loss makes its logits in chunks of a cut vocabulary too, 0 where of a whole one
            alone.
        keeps_gathered: 1 where a split sequence stays gathered for the backward pass (0: is gathered again).
        repeats_shared: 1 where each tensor-parallel rank holds the router and the experts that all tokens visit whole,
            0 where these are cut.
        weighs_head: 1 where stages are even in work, the head's with it, 0 where they are even in layers.
        keeps_sent: 1 where a sent output is kept until the peer has answered, 0 where it is freed once it is sent.
        selects_products: share of the products whose results selective recomputation keeps, beside attention's; 0 where
            it drops the scores alone.
    """

    element_bytes: Array
    input_bytes: Array
    weight_shard_bytes: Array
    update_bytes: Array
    listed_bytes: Array
    moments: Array
    masters: Array
    bucket_bytes: Array
    logit_bytes: Array
    norm_bytes: Array
    gathers_logits: Array
    chunks_cut_head: Array
    keeps_gathered: Array
    repeats_shared: Array
    weighs_head: Array
    keeps_sent: Array
    selects_products: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkMemory:
    """The same of one software, as plain numbers that compare and hash; the defaults are those of most software today.
    ``places_tensors``: a compiler places every tensor in advance (XLA), without gaps.
    """

    element_bytes: float = 2.0
    input_bytes: float = 1.0
    weight_shard_bytes: float = 2.0
    update_bytes: float = 0.0
    listed_bytes: float = 0.0
    moments: float = 2.0
    masters: float = 1.0
    bucket_bytes: float = 0.0
    logit_bytes: float = 10.0
    norm_bytes: float = 0.0
    gathers_logits: bool = False
    chunks_cut_head: bool = False
    keeps_gathered: bool = False
    repeats_shared: bool = False
    weighs_head: bool = False
    keeps_sent: bool = False
    selects_products: float = 0.0
    places_tensors: bool = False


MEGATRON = FrameworkMemory()
"""A split sequence gathered again, a vocabulary-parallel loss in fp32, 8-bit inputs kept in 8 bits (Megatron-LM)."""


def keeping_of(held: FrameworkMemory) -> KeptMemory:
    return KeptMemory(**{field.name: array(getattr(held, field.name)) for field in fields(KeptMemory)})


def superstep(*, element_bytes: int = 2, moments: float = 2, masters: float = 1) -> KeptMemory:
    """Superstep's own memory: its norms are one function, its gathered sequences stay."""
    return keeping_of(
        FrameworkMemory(
            element_bytes=element_bytes,
            input_bytes=element_bytes,
            # In fp32 the master weights are all there are.
            weight_shard_bytes=4 if element_bytes == 4 else 0,
            moments=moments,
            masters=masters,
            logit_bytes=4 + element_bytes,
            chunks_cut_head=True,
            keeps_gathered=True,
            repeats_shared=True,
            weighs_head=True,
            keeps_sent=True,
            selects_products=1.0,
        )
    )


def megatron() -> KeptMemory:
    return keeping_of(MEGATRON)

"""Shorthand: names of training software with versions, for the properties of a price.

No formula knows a name. A name stands for a ``Software``, a list of properties with their source; users may state the
properties themselves. Software of an unknown name is fused and overlapped, like today's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from superstep.cost.closed.framework import Attention, Software
from superstep.cost.closed.framework_memory import MEGATRON

WHOLE = 1e12
"""A bucket for everything: one collective for each unit, or for all."""

_TORCH = replace(MEGATRON, logit_bytes=18.0, norm_bytes=6.0)
"""torch's own loss: logits in 16 bits, and in fp32 themselves, their log-softmax, and two gradients."""
_COMPILED = replace(_TORCH, logit_bytes=4.0)
"""A compiled loss, or FlashAttention's, reads logits and writes their gradient, both in 16 bits."""
_EAGER = Software(has_fused_norms=False, has_fused_kernels=False, gradient_bytes=2, kept_gradient_bytes=2)
_LISTED = 4.0
"""torch's AdamW goes through lists of tensors (foreach) by default, which "uses ~ sizeof(params) more peak memory" by
its documentation: the roots of the second moments, in fp32.
"""
_MEGATRON_16 = Software(gradient_bytes=2, kept_gradient_bytes=2, bucket_bytes=WHOLE, overlaps_data=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorthand:
    """A name.

    Attributes:
        words: a pattern in the name, in lower case.
        since: the year from which it stands for these properties.
        software: the properties; attention is that of its year unless ``attention`` is set.
        attention: its own kernel, until the year ``attention_until``.
        drops_until: the year until which its models use dropout by default.
        splits_stream: tensor-parallel ranks always split the work between products over the sequence.
        source: where the properties are documented.
    """

    words: str
    since: float = 0.0
    software: Software
    attention: Attention | None = None
    attention_until: float = 0.0
    drops_until: float = 0.0
    splits_stream: bool = False
    source: str


KNOWN: tuple[Shorthand, ...] = (
    Shorthand(
        words="maxtext|jax|xla|pax|t5x",
        software=Software(
            gradient_bytes=2,
            bucket_bytes=WHOLE,
            overlaps_tensor=True,
            holds=replace(_COMPILED, weight_shard_bytes=0.0, selects_products=1.0, places_tensors=True),
        ),
        splits_stream=True,
        source="XLA fuses what is between products and moves parameters and activations beside compute "
        "(its latency-hiding scheduler); MaxText's base.yml: activation_embed is cut over tensor, and its policy "
        "minimal keeps what products gave.",
    ),
    Shorthand(
        words="titan",
        software=Software(
            gradient_bytes=2,
            bucket_bytes=WHOLE,
            holds=replace(_COMPILED, weight_shard_bytes=0.0, selects_products=0.5),
        ),
        source="torchtitan (Liang 2024): every block compiled, FSDP2, every second product kept by its selective mode.",
    ),
    Shorthand(
        words="compile",
        software=Software(gradient_bytes=2, bucket_bytes=WHOLE, holds=replace(_COMPILED, weight_shard_bytes=0.0)),
        source="torch.compile fuses norms, sums and the loss; FSDP gathers and reduces unit by unit.",
    ),
    Shorthand(
        words="nemo|core|bridge|primus",
        software=Software(kept_gradient_bytes=2, overlaps_data=False),
        source="Megatron Core's documentation: buckets of 40M numbers or 1M a rank, overlap_grad_reduce and "
        "tp_comm_overlap are options; its recipes reduce in bf16 where grad_reduce_in_fp32 is off.",
    ),
    Shorthand(
        words="deepspeed-megatron|megatron-deepspeed|neox",
        software=_MEGATRON_16,
        source="Megatron-DeepSpeed, GPT-NeoX: one reduction of fp16 gradients after the last backward pass.",
    ),
    Shorthand(
        words="megatron",
        since=2021.25,
        software=Software(bucket_bytes=WHOLE, overlaps_data=False),
        attention="fused-softmax",
        attention_until=2024.0,
        drops_until=2024.0,
        source="Megatron-LM's arguments.py: gradients accumulated and reduced in fp32 (Narayanan 2021), a fused masked "
        "softmax unless --use-flash-attn, dropout 0.1.",
    ),
    Shorthand(
        words="megatron",
        software=replace(_MEGATRON_16, kept_gradient_bytes=4),
        attention="fused-softmax",
        attention_until=2024.0,
        drops_until=2024.0,
        source="Megatron-LM before gradients were accumulated in fp32.",
    ),
    Shorthand(
        words="internevo",
        software=Software(
            gradient_bytes=2,
            kept_gradient_bytes=2,
            bucket_bytes=25e6,
            bucket_bytes_per_rank=0,
            overlaps_data=False,
            holds=replace(_COMPILED, update_bytes=14.0),
        ),
        source="InternEvo (Chen 2024) and its hybrid_zero_optim.py: an update flattens 16-bit gradients (2 bytes), "
        "copies them to fp32 (4), and Adam makes two of those (8).",
    ),
    Shorthand(
        words="oneflow",
        software=Software(
            gradient_bytes=2, kept_gradient_bytes=2, bucket_bytes=25e6, bucket_bytes_per_rank=0, holds=_COMPILED
        ),
        source="OneFlow (Yuan 2021): a compiled graph; reductions start as gradients come.",
    ),
    Shorthand(
        words="foundry|composer|mosaic",
        software=Software(
            has_fused_kernels=False,
            gradient_bytes=2,
            bucket_bytes=WHOLE,
            holds=replace(_COMPILED, weight_shard_bytes=0.0),
        ),
        source="LLM Foundry: torch FSDP with limit_all_gathers, layer norms of torch, FlashAttention's cross entropy.",
    ),
    Shorthand(
        words="aleph",
        software=replace(
            _EAGER,
            bucket_bytes=25e6,
            bucket_bytes_per_rank=0,
            overlaps_data=False,
            holds=replace(_TORCH, gathers_logits=True),
        ),
        source="Aleph Alpha scaling (Hagemann 2023): eager torch but for the kernels that a run names; the head's "
        "parallel_output is off, the loss is torch's.",
    ),
    Shorthand(
        words="deepspeed",
        software=replace(_EAGER, bucket_bytes=WHOLE, holds=replace(_TORCH, bucket_bytes=2e9)),
        source="DeepSpeed round Hugging Face's modelling code, which is eager; two buckets of 5e8 numbers "
        "(reduce_bucket_size, overlap_comm).",
    ),
    Shorthand(
        words="transformers|fsdp",
        software=replace(
            _EAGER, kept_gradient_bytes=4, bucket_bytes=WHOLE, holds=replace(_TORCH, weight_shard_bytes=0.0)
        ),
        source="Hugging Face's modelling code under FSDP: eager, a shard in fp32 and nothing beside it.",
    ),
)
"""The first with words in a name and a year that has come."""

UNKNOWN: tuple[Shorthand, ...] = (
    Shorthand(
        words="",
        since=2024.0,
        software=Software(
            gradient_bytes=2,
            bucket_bytes=25e6,
            bucket_bytes_per_rank=0,
            holds=replace(MEGATRON, listed_bytes=_LISTED),
        ),
        source="Nothing is known: fused and overlapped, as today's software is, with torch's own AdamW. Most of "
        "those above reduce in 16 bits, and buckets grow with the ranks in Megatron Core's alone; torch's are of 25 MB "
        "(bucket_cap_mb). Copies of the logits: Megatron's, in the middle of those above.",
    ),
    Shorthand(
        words="",
        software=replace(
            _EAGER,
            kept_gradient_bytes=4,
            bucket_bytes=25e6,
            bucket_bytes_per_rank=0,
            holds=replace(_COMPILED, norm_bytes=6.0),
        ),
        source="Nothing is known, and torch.compile (torch 2.0, March 2023) was not in wide use: eager, overlapped, in "
        "torch's buckets of 25 MB (bucket_cap_mb), with one of the fused losses that were there.",
    ),
)
"""Properties of unknown names, by year."""


def shorthand(name: str, year: float) -> Shorthand:
    """The meaning of a name in a year; one of ``UNKNOWN`` where none is known."""
    known = (*KNOWN, *UNKNOWN)
    return next(each for each in known if re.search(each.words, name.lower()) and year >= each.since)


def usual_attention(known: Shorthand, year: float) -> Attention:
    """The kernel of a software that does not state it: its own, or the year's usual one."""
    if known.attention is not None and year < known.attention_until:
        return known.attention
    if year < 2022.5:
        return "fused-softmax"
    # FlashAttention 3 appeared in July 2024 (Shah 2024), and cuDNN's kernel of that speed was the default by then.
    return "flash-2" if year < 2024.5 else "flash-3"

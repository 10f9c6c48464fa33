"""BlockStyle: how a family's blocks, embedding and head differ from Llama's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norms = Literal["before", "after", "around"]
Gate = Literal["silu", "gelu_tanh"]

NORM_NAMES: dict[Norms, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}
"""Hugging Face's names of a block's norms: before and after attention, before and after the feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStyle:
    """The numbers and choices in which families differ, beside their sizes; the defaults are Llama's.

    Attributes:
        norms: where a block's norms stand: before attention and feed-forward, after them (OLMo 2) or both (Gemma 2).
        norm_offset: added to the weights of norms (Gemma: 1).
        gate: the activation of the feed-forward's gate.
        gate_limit: with it, gate and up are clamped to this size, and an expert is
            down((up + 1) · gate · sigmoid(gate_slope · gate)) (gpt-oss); None for silu(gate) · up.
        gate_slope: see ``gate_limit``.
        expert_biases: router and experts have biases, and gate and up of an expert are one matrix, their columns in
            turn (gpt-oss).
        attention_sinks: each head has a learned score that joins every query's softmax (gpt-oss).
        out_bias: the product after attention has a bias.
        wide_qk_norm: with ``qk_norm``, one norm over all heads together (OLMo 2), not one for each head.
        query_scale: multiplies scores; None for 1 / sqrt(head_dim).
        soft_cap: of the scores of attention: a score s becomes soft_cap · tanh(s / soft_cap); None for no cap.
        logit_cap: the same for the logits.
        scales_embedding: what the embedding gives is multiplied by sqrt(width) (Gemma).
        embedding_scale: multiplies what the embedding gives (Granite).
        residual_scale: multiplies what attention and feed-forward add to the residual stream (Granite).
        logit_divisor: divides the logits (Granite).
        local_theta: rotary base of layers with a window, whose wavelengths are not scaled (Gemma 3, OLMo 3); None for
            the same rotary embedding in all layers.
        rotary_share: of the numbers of a head, those that are rotated, the first ones (Qwen3-Next).
        output_gate: attention's output is multiplied by the sigmoid of a projection (Qwen3-Next).
        shared_gate: so is that of shared experts, by one number for each token (Qwen3-Next).
    """

    norms: Norms = "before"
    norm_offset: float = 0.0
    gate: Gate = "silu"
    gate_limit: float | None = None
    gate_slope: float = 1.0
    expert_biases: bool = False
    attention_sinks: bool = False
    out_bias: bool = False
    wide_qk_norm: bool = False
    query_scale: float | None = None
    soft_cap: float | None = None
    logit_cap: float | None = None
    scales_embedding: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    local_theta: float | None = None
    rotary_share: float = 1.0
    output_gate: bool = False
    shared_gate: bool = False

    @property
    def norm_count(self) -> int:
        """Norms of a block, without those of queries and keys."""
        return sum(name is not None for name in NORM_NAMES[self.norms])


LLAMA = BlockStyle()
OLMO = BlockStyle(norms="after", wide_qk_norm=True)
GEMMA = BlockStyle(norms="around", norm_offset=1.0, gate="gelu_tanh", scales_embedding=True)
QWEN_NEXT = BlockStyle(norm_offset=1.0, rotary_share=0.25, output_gate=True)
GPT_OSS = BlockStyle(expert_biases=True, attention_sinks=True, out_bias=True, gate_limit=7.0, gate_slope=1.702)

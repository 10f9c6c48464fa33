"""DecoderNumbers: the numbers of a language model that decide its cost, of one model or of many at once.

Wider than what Superstep trains: published runs have layer norms with biases, plain feed-forwards, dropout and unfused
attention. Every field is an array; arrays of one shape are as many models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from superstep.hardware.units import Array
from superstep.plan.model.attention_rule import DELTA_CHUNK
from superstep.plan.model.shape import ROTATED, ModelShape
from superstep.plan.sharding.padding import ALIGN
from superstep.plan.sharding.unit_flops import count_linear


def array(value: object) -> Array:
    """Numbers or truth values as an array of floats."""
    return np.asarray(value, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderNumbers:
    """Decoders by their dims.

    Attributes:
        layers, width, heads, kv_heads, head_dim, ffn, vocab: L, D, N, K, H, F, V.
        gated: 1 where the feed-forward has a gate: three matrices for two.
        tied: 1 where embedding and head share their matrix.
        biases: 1 where products and norms have biases.
        qkv_biases: 1 where queries, keys and values alone have.
        out_biases: 1 where the product after attention has.
        expert_biases: 1 where experts and their router have.
        sinks: 1 where attention has a sink for each head.
        wide_norms: 1 where queries and keys have norms over all heads.
        norms: of a layer, on the residual stream.
        dropout: 1 where the model drops activations.
        experts, experts_per_token, shared_ffn: E, k, and the inner width of shared experts; 0 where dense.
        expert_ffn: F of one expert.
        dense_layers: layers before the mixtures begin.
        sequence_tokens: S.
        query_rank, key_rank: inner widths of latent attention (DeepSeek-V2, sec. 2.1); 0 where there is none.
        imbalance: rows of the rank with the most, over the mean; 1 where the router spreads tokens evenly.
        rotates: 1 with rotary positions; 0 where positions are learned or biased.
        frozen: 1 where the weights are frozen and low-rank adapters train (Hu 2021).
        window, windowed_layers: tokens that a token sees in such a share of the layers; in the others all before it.
        output_gates, shared_gates: 1 where attention's output has a gate, and where shared experts have.
        linear_layers, linear_parameters: the share of layers with linear attention, and its parameters in one of them.
    """

    layers: Array
    width: Array
    heads: Array
    kv_heads: Array
    head_dim: Array
    ffn: Array
    vocab: Array
    gated: Array
    tied: Array
    biases: Array
    dropout: Array
    experts: Array
    experts_per_token: Array
    shared_ffn: Array
    expert_ffn: Array
    dense_layers: Array
    sequence_tokens: Array
    query_rank: Array
    key_rank: Array
    frozen: Array
    qkv_biases: Array = field(default_factory=lambda: np.zeros(()))
    out_biases: Array = field(default_factory=lambda: np.zeros(()))
    expert_biases: Array = field(default_factory=lambda: np.zeros(()))
    sinks: Array = field(default_factory=lambda: np.zeros(()))
    wide_norms: Array = field(default_factory=lambda: np.zeros(()))
    norms: Array = field(default_factory=lambda: np.full((), 2.0))
    imbalance: Array = field(default_factory=lambda: np.ones(()))
    rotates: Array = field(default_factory=lambda: np.ones(()))
    window: Array = field(default_factory=lambda: np.zeros(()))
    windowed_layers: Array = field(default_factory=lambda: np.zeros(()))
    output_gates: Array = field(default_factory=lambda: np.zeros(()))
    shared_gates: Array = field(default_factory=lambda: np.zeros(()))
    linear_layers: Array = field(default_factory=lambda: np.zeros(()))
    linear_parameters: Array = field(default_factory=lambda: np.zeros(()))

    @property
    def turned(self) -> Array:
        """Rotated numbers of a head's query and key in latent attention, beyond its value's."""
        return np.where(self.key_rank > 0, float(ROTATED), 0.0)

    @property
    def query_inputs(self) -> Array:
        """Inputs of the queries of latent attention: the narrow width, or the stream's."""
        return np.where(self.query_rank > 0, self.query_rank, self.width)

    @property
    def attention_parameters(self) -> Array:
        """Matrices of one attention, in the mean of layers: queries, keys, values, output; their biases, and sinks."""
        plain = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        plain = plain + self.qkv_biases * self.head_dim * (self.heads + 2 * self.kv_heads)
        plain = plain + self.wide_norms * self.head_dim * (self.heads + self.kv_heads)
        plain = plain + self.out_biases * self.width + self.sinks * self.heads
        wide = self.heads * self.head_dim
        plain = plain + self.output_gates * self.width * wide
        plain = (1 - self.linear_layers) * plain + self.linear_layers * self.linear_parameters
        down = self.width * (self.query_rank + self.key_rank + ROTATED)
        latent = down + 1.5 * self.query_inputs * wide + 2 * self.key_rank * wide + wide * self.width
        return np.where(self.key_rank > 0, latent, plain)

    @property
    def matrices(self) -> Array:
        return 2 + self.gated

    @property
    def moe_layers(self) -> Array:
        return np.where(self.experts > 0, self.layers - self.dense_layers, 0.0)

    @property
    def expert_parameters(self) -> Array:
        biases = self.expert_biases * ((self.matrices - 1) * self.expert_ffn + self.width)
        return self.experts * (self.matrices * self.width * self.expert_ffn + biases)

    @property
    def dense_parameters(self) -> Array:
        """One layer without experts: attention, feed-forward, norms."""
        return self.attention_parameters + self.matrices * self.width * self.ffn + self.norms * self.width

    @property
    def mixture_parameters(self) -> Array:
        """One layer with experts, without these: attention, router, shared experts, norms."""
        shared = self.matrices * self.width * self.shared_ffn + self.experts * (self.width + self.expert_biases)
        return self.attention_parameters + shared + (self.norms + self.shared_gates) * self.width

    @property
    def parameters(self) -> Array:
        """The whole model; a tied matrix counts once."""
        dense = (self.layers - self.moe_layers) * self.dense_parameters
        mixtures = self.moe_layers * (self.mixture_parameters + self.expert_parameters)
        return dense + mixtures + self.vocab * self.width * (2 - self.tied) + self.width

    def vocab_part(self, tp: Array) -> Array:
        """Rows of a vocabulary matrix on each tensor-parallel rank, by ``plan.sharding.padding``'s rule."""
        even = self.vocab / tp
        return np.where(even == np.floor(even), even, np.ceil(even / ALIGN) * ALIGN)


def _count_linear_layer(shape: ModelShape) -> int:
    """Parameters of linear attention: matrices, decays, and the norm of its heads."""
    if shape.delta is None:
        return 0
    return count_linear(shape.width, shape.delta) + 2 * shape.delta.value_heads + shape.delta.value_dim


def _share_of_others(shape: ModelShape) -> float:
    """The share of layers that are not in ``full_layers``."""
    return 1 - len(shape.full_layers) / shape.layers


def decoder_of(shape: ModelShape, sequence_tokens: int) -> DecoderNumbers:
    """The numbers of Superstep's own decoder."""
    moe, latent = shape.moe, shape.latent
    return DecoderNumbers(
        layers=array(shape.layers),
        width=array(shape.width),
        heads=array(shape.heads),
        kv_heads=array(shape.kv_heads),
        head_dim=array(shape.head_dim),
        ffn=array(shape.dense_ffn if moe else shape.ffn),
        vocab=array(shape.vocab),
        gated=array(1),
        tied=array(shape.tied),
        biases=array(0),
        qkv_biases=array(shape.qkv_bias),
        out_biases=array(shape.style.out_bias),
        expert_biases=array(shape.style.expert_biases),
        sinks=array(shape.style.attention_sinks),
        wide_norms=array(shape.has_wide_qk_norm),
        norms=array(shape.style.norm_count),
        dropout=array(0),
        experts=array(moe.experts if moe else 0),
        experts_per_token=array(moe.experts_per_token if moe else 0),
        shared_ffn=array(moe.shared_experts * shape.ffn if moe else 0),
        expert_ffn=array(shape.ffn if moe else 0),
        dense_layers=array(shape.dense_layers),
        sequence_tokens=array(sequence_tokens),
        query_rank=array((latent.query_rank or 0) if latent else 0),
        key_rank=array(latent.key_rank if latent else 0),
        frozen=array(0),
        # A chunk's tokens, and a state that is about as wide, cost what so many keys do.
        window=array(shape.window or (4 * DELTA_CHUNK if shape.delta else 0)),
        windowed_layers=array(_share_of_others(shape) * (shape.window is not None or shape.delta is not None)),
        output_gates=array(shape.style.output_gate),
        shared_gates=array(shape.style.shared_gate),
        linear_layers=array(_share_of_others(shape) * (shape.delta is not None)),
        linear_parameters=array(_count_linear_layer(shape)),
    )

"""Activations: the bytes that one layer leaves for its backward pass, of one microbatch on one rank.

T tokens of the microbatch on a context-parallel rank, t those of the residual stream there (T / tp where the sequence
is split); N, K heads on a tensor-parallel rank, H their width, F the inner width there, D width, e bytes of a number:

    inputs of both norms                                2 · t·D·e   (not one kernel: + 2 · t·D·norm_bytes)
    inputs of what attention and feed-forward multiply  2 · t·D·e   (T where they stay gathered)
    queries, keys, values; attention's output           T·(2N + 2K)·H·e
    scores: softmax; with dropout its mask and output   T·S·N·(e; + 1 + e)
    fused attention instead: log-sum-exp                T·N·4
    masks of two dropouts                               2 · t·D
    feed-forward: what its activation read and gave     2 · T·F·e
    gated: gate, up, their product; silu(gate) unfused  (3; 4) · T·F·e
    in 8 bits: a product's input is kept in 8 bits; attention's output besides, as it keeps that itself

With dropout, F = 4·D, N = K, S keys to a query and e = 2 that is s·b·h·(10 + 24/t + 5·a·s/(h·t)) bytes without a split
sequence, and s·b·h/t·(34 + 5·a·s/h) with it (Korthikanti 2022, eq. 2 and 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superstep.cost.closed.framework_arrays import ATTENTION, Stack
from superstep.cost.closed.framework_memory import KeptMemory
from superstep.cost.closed.model_numbers import DecoderNumbers
from superstep.cost.closed.parallel_degrees import Layout
from superstep.hardware.units import Array

FP32 = 4.0
INDEX = 8.0
"""Bytes of an index of a token or row."""
READ_BY_LAYERS = ("microbatch", "cp", "tp", "ep", "sequence_parallel")
"""The fields of a layout on which a layer's bytes depend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """A layer's bytes for one microbatch.

    Attributes:
        whole: for its backward pass, without recomputation.
        selective: the same, with the work between products recomputed.
        boundary: its input.
        deferred: from the gradient of its input to those of its weights, where these come later.
        transient: made and dropped within its backward pass.
    """

    whole: Array
    selective: Array
    boundary: Array
    deferred: Array
    transient: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchDims:
    """Dims of a microbatch on one rank; ``G``: tokens of the kept input of a cut product."""

    T: Array
    t: Array
    G: Array
    D: Array
    N: Array
    K: Array
    H: Array


def local(model: DecoderNumbers, layout: Layout, keeping: KeptMemory) -> MicrobatchDims:
    tokens = layout.microbatch * model.sequence_tokens / layout.cp
    stream = np.where(layout.sequence_parallel > 0, tokens / layout.tp, tokens)
    return MicrobatchDims(
        T=tokens,
        t=stream,
        G=np.where(keeping.keeps_gathered > 0, tokens, stream),
        D=model.width,
        N=model.heads / layout.tp,
        K=np.maximum(model.kv_heads / layout.tp, 1.0),
        H=model.head_dim,
    )


def dense_layer(model: DecoderNumbers, layout: Layout, stack: Stack, keeping: KeptMemory) -> LayerBytes:
    """A layer with one feed-forward."""
    d, e = local(model, layout, keeping), keeping.element_bytes
    inner = d.T * model.ffn / layout.tp * e
    kept = d.G * d.D * _read_bytes(stack, keeping) + _activation(model, stack, keeping) * inner
    half = _FeedForward(
        kept=kept,
        products=(1 + model.gated) * inner + d.t * d.D * e,
        deferred=2 * d.T * d.D * e + (2 + model.gated) * inner,
        transient=(1 + model.gated) * inner,
    )
    return _layer(model, d, stack, keeping, half)


def mixture_layer(model: DecoderNumbers, layout: Layout, stack: Stack, keeping: KeptMemory) -> LayerBytes:
    """A layer with a mixture of experts; tp cuts the tokens there.

    Rows that go to experts and come back are copies of their tokens, kept both ways.
    """
    d, e = local(model, layout, keeping), keeping.element_bytes
    own = d.T / layout.tp
    rows = own * model.experts_per_token * model.imbalance
    inner = (rows * model.expert_ffn + own * model.shared_ffn) * e
    passed = rows * d.D * e
    router = d.t * model.experts * 2 * FP32
    orders = rows * INDEX * np.where(layout.ep > 1, 2.0, 1.0)
    activation = _activation(model, stack, keeping) * inner
    beside = np.where(model.shared_ffn > 0, own * d.D * e, 0.0)
    half = _FeedForward(
        kept=own * d.D * e + 2 * passed + activation + router + orders,
        products=(1 + model.gated) * inner + passed + 2 * beside + router / 2,
        deferred=2 * (passed + beside) + (2 + model.gated) * inner,
        transient=2 * passed + (1 + model.gated) * inner,
    )
    return _layer(model, d, stack, keeping, half)


def _read_bytes(stack: Stack, keeping: KeptMemory) -> Array:
    """Bytes of a number that a product reads, as it is kept."""
    return np.where(stack.is_eight_bit > 0, keeping.input_bytes, keeping.element_bytes)


def _activation(model: DecoderNumbers, stack: Stack, keeping: KeptMemory) -> Array:
    """Tensors of the feed-forward's width that stay: the activation's inputs, and the next product's."""
    gate = np.where(stack.has_fused_elementwise > 0, 2.0, 3.0)
    return np.where(model.gated > 0, gate, 1.0) + _read_bytes(stack, keeping) / keeping.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _FeedForward:
    """The half of a layer after attention.

    Attributes:
        kept: for its backward pass.
        products: the part that selective recomputation keeps, where it keeps products' results.
        deferred: inputs of its products and the gradients of their outputs.
        transient: made and dropped in its backward pass.
    """

    kept: Array
    products: Array
    deferred: Array
    transient: Array


def _layer(
    model: DecoderNumbers, d: MicrobatchDims, stack: Stack, keeping: KeptMemory, half: _FeedForward
) -> LayerBytes:
    """Attention and the residual stream, beside what the feed-forward keeps."""
    e = keeping.element_bytes
    stream = d.t * d.D * e
    # Latent attention's queries and keys are wider than its values, and what they come from stays, as it is and normed.
    narrow = 2 * d.t * (model.query_rank + model.key_rank) * e
    heads = d.T * ((d.N + 2 * d.K) * d.H + (d.N + d.K) * model.turned) * e + narrow
    mixed = d.T * d.N * d.H * e
    read = _read_bytes(stack, keeping)
    # Attention keeps its output as it is; where the next product reads another format, that is kept besides.
    again = np.where(read < e, d.T * d.N * d.H * read, 0.0)
    is_fused = stack.attention >= ATTENTION.index("flash-1")
    scores = d.T * model.sequence_tokens * d.N
    core = np.where(is_fused, d.T * d.N * FP32, _scores(model, scores, stack, e))
    norms = 2 * stream + np.where(stack.has_fused_norms > 0, 0.0, 2 * keeping.norm_bytes * d.t * d.D)
    masks = 2 * model.dropout * d.t * d.D
    whole = norms + d.G * d.D * read + heads + mixed + again + core + masks + half.kept
    few = stream + mixed + core + keeping.selects_products * (heads + d.T * d.D * e + half.products)
    # Fused attention sums the queries' gradients in fp32; the others hold those of softmax and of what it read.
    is_eager = stack.attention == ATTENTION.index("eager")
    at_scores = np.where(
        is_fused, d.T * d.N * (d.H + model.turned) * FP32, scores * np.where(is_eager, 2 * e + FP32, 2 * e)
    )
    return LayerBytes(
        whole=whole,
        selective=np.where(keeping.selects_products > 0, few, whole - core),
        boundary=stream,
        deferred=d.T * d.D * e + mixed + heads + d.T * d.D * e + half.deferred,
        transient=2 * stream + np.maximum(half.transient, heads + mixed + at_scores),
    )


def _scores(model: DecoderNumbers, scores: Array, stack: Stack, e: Array) -> Array:
    """Softmax, in fp32 and rounded where nothing is fused; with dropout its mask and result."""
    is_eager = stack.attention == ATTENTION.index("eager")
    return scores * (np.where(is_eager, FP32 + e, e) + model.dropout * (1 + e))

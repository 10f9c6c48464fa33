"""The work of a unit, by which units are split into stages; ``cost.program.flops`` has the letters."""

from __future__ import annotations

from superstep.plan.model.attention_rule import DELTA_CHUNK, DeltaShape
from superstep.plan.model.shape import ModelShape


def forward_flops_per_token(shape: ModelShape, sequence_tokens: int) -> tuple[int, ...]:
    """Floating-point operations of each unit's forward pass for one token of a sequence, in model order.

    Only products count; the backward pass takes twice as many in every unit.
    """

    def block(layer: int) -> int:
        own = shape.at(layer)
        if own.delta is not None:
            return _delta_flops(own.delta) + 2 * _active(own)
        # Scores are products of queries and keys, and sum values.
        visible = count_visible_tokens(shape, layer, sequence_tokens)
        return 2 * visible * shape.heads * (2 * shape.head_dim + shape.turned) + 2 * _active(own)

    head = 2 * shape.width * shape.vocab
    if shape.mtp_weight is not None:
        last = shape.layers - 1
        return 0, *map(block, range(shape.layers)), block(last) + 4 * shape.width**2, 2 * head
    return 0, *map(block, range(shape.layers)), head


def _delta_flops(delta: DeltaShape) -> int:
    """Operations of the gated delta rule for one token: products within its chunk, and with the state."""
    of_keys = 2 * delta.key_heads * DELTA_CHUNK * delta.key_dim
    within = DELTA_CHUNK * (2 * delta.value_dim + delta.key_dim)
    return 2 * (of_keys + delta.value_heads * (within + 3 * delta.key_dim * delta.value_dim))


def _active(shape: ModelShape) -> int:
    """Parameters that a token uses in a block."""
    active = cut_matrices(shape) + whole_matrices(shape)
    if shape.moe:
        active += shape.moe.experts_per_token * (feed_forward(shape) + shape.width)
    return active


def count_visible_tokens(shape: ModelShape, layer: int, sequence_tokens: int) -> int:
    """Keys of a query in a layer, as if attention were not causal: the whole sequence, or a sliding window of it."""
    return shape.rule(layer).window_in(sequence_tokens) or sequence_tokens


def cut_vectors(shape: ModelShape) -> int:
    """Elements of a block's biases, of norms over all heads and of sinks, which tensor parallelism cuts with their
    heads.
    """
    if shape.delta is not None:  # decays, and steps of them
        return 2 * shape.delta.value_heads
    biases = shape.heads + 2 * shape.kv_heads if shape.qkv_bias else 0
    norms = shape.heads + shape.kv_heads if shape.has_wide_qk_norm else 0
    return (biases + norms) * shape.head_dim + (shape.heads if shape.style.attention_sinks else 0)


def whole_vectors(shape: ModelShape) -> int:
    """Elements of a block's other norms, and of the biases of its output and its router."""
    narrow = 0 if shape.latent is None else shape.latent.narrow
    heads = 2 * shape.head_dim if shape.qk_norm and not shape.style.wide_qk_norm else 0
    if shape.delta is not None:
        heads = shape.delta.value_dim
    biases = shape.width if shape.style.out_bias else 0
    biases += shape.moe.experts if shape.moe and shape.style.expert_biases else 0
    return shape.style.norm_count * shape.width + heads + narrow + biases


def cut_matrices(shape: ModelShape) -> int:
    """Elements of a block's matrices that tensor parallelism cuts: attention's, and a single feed-forward's."""
    D, queries, keys = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = 0 if shape.moe else feed_forward(shape)
    if shape.delta is not None:
        return count_linear(D, shape.delta) + inner
    if shape.style.output_gate:
        inner += D * queries
    if shape.latent is None:
        return D * (queries + 2 * keys) + queries * D + inner
    turned = queries + shape.heads * shape.turned
    return (shape.latent.query_rank or D) * turned + 2 * shape.latent.key_rank * queries + queries * D + inner


def count_linear(width: int, delta: DeltaShape) -> int:
    """Elements of the matrices of linear attention, and of its convolution, without vectors."""
    mixed, (*_, values) = sum(delta.sections), delta.sections
    return width * (mixed + 2 * values + 2 * delta.value_heads) + mixed * delta.taps


def whole_matrices(shape: ModelShape) -> int:
    """Elements of a block's matrices that no axis cuts: router and shared experts, latent attention's input."""
    narrow = 0 if shape.latent is None else shape.latent.narrow + shape.turned
    if shape.moe is None:
        return shape.width * narrow
    gate = 1 if shape.style.shared_gate else 0
    return shape.width * (narrow + shape.moe.logits + gate) + shape.moe.shared_experts * feed_forward(shape)


def feed_forward(shape: ModelShape) -> int:
    """Elements of the matrices of one feed-forward, or of one expert."""
    return 3 * shape.width * shape.ffn


def expert_biases(shape: ModelShape) -> int:
    """Elements of one expert's biases."""
    return 2 * shape.ffn + shape.width if shape.style.expert_biases else 0

"""The work of a unit, which decides how units are shared out into stages; ``cost.program.work`` has the letters."""

from __future__ import annotations

from superstep.plan.model.shape import ModelShape


def forward_flops_per_token(shape: ModelShape, sequence_tokens: int) -> tuple[int, ...]:
    """Floating-point operations of each unit's forward pass for one token of a sequence, in model order.

    Products alone count; the backward pass takes twice as many in every unit.
    """
    attention = 4 * seen_tokens(shape, sequence_tokens) * shape.heads * shape.head_dim
    active = cut_matrices(shape) + whole_matrices(shape)
    if shape.moe:
        active += shape.moe.experts_per_token * (feed_forward(shape) + shape.width)
    return 0, *[2 * active + attention] * shape.layers, 2 * shape.width * shape.vocab


def seen_tokens(shape: ModelShape, sequence_tokens: int) -> int:
    """Keys that a query meets, as if attention were not causal: the whole sequence, or a sliding window of it."""
    return min(sequence_tokens, shape.window or sequence_tokens)


def biases(shape: ModelShape) -> int:
    """Parameters in the biases of one block, which tensor parallelism cuts with their heads."""
    return (shape.heads + 2 * shape.kv_heads) * shape.head_dim if shape.qkv_bias else 0


def cut_matrices(shape: ModelShape) -> int:
    """Parameters in the matrices of one block that tensor parallelism cuts: attention's, and a lone feed-forward's."""
    D, queries, keys = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return D * (queries + 2 * keys) + queries * D + (0 if shape.moe else feed_forward(shape))


def whole_matrices(shape: ModelShape) -> int:
    """Parameters in those that no axis cuts: a mixture's router and shared experts."""
    if shape.moe is None:
        return 0
    return shape.width * shape.moe.logits + shape.moe.shared_experts * feed_forward(shape)


def feed_forward(shape: ModelShape) -> int:
    """Parameters in the matrices of one feed-forward, or of one expert."""
    return 3 * shape.width * shape.ffn

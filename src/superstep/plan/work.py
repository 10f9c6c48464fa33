"""The work of a unit, which decides how units are shared out into stages; ``cost.work`` has the letters."""

from __future__ import annotations

from superstep.plan.shape import ModelShape


def forward_flops_per_token(shape: ModelShape, sequence_tokens: int) -> tuple[int, ...]:
    """Floating-point operations of each unit's forward pass for one token of a sequence, in model order.

    Products alone count; the backward pass takes twice as many in every unit.
    """
    attention = 4 * sequence_tokens * shape.heads * shape.head_dim
    block = 2 * block_matrices(shape) + attention
    return 0, *[block] * shape.layers, 2 * shape.width * shape.vocab


def block_matrices(shape: ModelShape) -> int:
    """Parameters in the matrices of one block."""
    D, F = shape.width, shape.ffn
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return D * (queries + 2 * keys) + queries * D + 3 * D * F

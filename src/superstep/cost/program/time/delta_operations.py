"""Operations of the gated delta rule: products of matrices of a chunk's tokens, the width of a key and of a value."""

from __future__ import annotations

from collections.abc import Iterator

from superstep.cost.program.buffers import FP32
from superstep.cost.program.time.operation import MatmulOperation, MemoryOperation, Operation
from superstep.plan.model.attention_rule import DELTA_CHUNK

FORWARD_PASSES, BACKWARD_PASSES = 12, 40
"""Passes over a key's or a value's numbers of all tokens, beside the products."""


def rule_operations(
    chunks: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, *, is_backward: bool
) -> Iterator[Operation]:
    """The operations of one direction; the backward computes the forward again.

    Args:
        chunks: of all sequences together; other arguments as of ``DeltaShape``, on one rank.
    """
    c, h, v = DELTA_CHUNK, key_dim, value_dim
    of_keys = [(c, h, c)] * 2
    of_values = [(c, c, v), (c, c, h), (c, h, v), (h, c, v), (c, h, v), (c, c, v)]
    if is_backward:
        of_keys.append((c, h, c))
        of_values += [(c, c, v), (h, c, v), (c, h, v), (h, c, v), (c, v, h), (c, c, v), (c, c, h), (c, v, c)]
        of_values += [(c, h, c), (c, v, c), (c, v, h), (c, v, h), (c, c, h), (c, c, h), (c, c, h)]
    for products, heads in ((of_keys, key_heads), (of_values, value_heads)):
        for rows, inner, width in products:
            yield MatmulOperation(rows=rows, inner=inner, width=width, batch=chunks * heads)
    passes = BACKWARD_PASSES if is_backward else FORWARD_PASSES
    yield MemoryOperation(kernel="copy", bytes=passes * FP32 * chunks * c * value_heads * (h + v) // 2)

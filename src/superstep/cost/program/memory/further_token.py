"""What the unit of multi-token prediction keeps: a block, and what joins it to the stream (``model.mtp``)."""

from __future__ import annotations

from superstep.cost.program.buffers import FP32, TOKEN
from superstep.cost.program.flops import LocalDims

Kept = tuple[int, int, int, int, tuple[int, int]]
"""Bytes kept in whole, selectively and of the input; the boundary; and what a backward pass in two keeps."""


def keep_further_token(block: Kept, d: LocalDims, e: int) -> Kept:
    """What a block keeps, with the ids and the embedding of the next tokens, their norm and that of the
    stream, which lie side by side as well, what the block takes, and the last norm's input and 1 / rms of all three.
    """
    whole, selective, kept_input, boundary, (inputs, gradients) = block
    stream, tokens = d.t * d.D * e, TOKEN * d.T
    beside = tokens + 6 * stream + 3 * d.t * FP32
    return whole + beside, selective + tokens + 2 * stream, kept_input + tokens, boundary, (inputs, gradients)

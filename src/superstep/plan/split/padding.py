"""How long a unit's flat buffer is: one rule for the buffers that are made and for the bytes that are predicted."""

from __future__ import annotations

ALIGN = 16
"""Elements: a shard starts on a cache line."""


def padded(numel: int, dp: int) -> int:
    """Elements of a buffer that holds ``numel`` and splits evenly over dp.

    A lone rank still pads to the alignment, so that the buffer does not depend on whether dp is 1.
    """
    step = dp * ALIGN
    return -(-numel // step) * step

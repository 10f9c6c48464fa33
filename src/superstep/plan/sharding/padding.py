"""Padding: how long a unit's flat buffer is, and how many rows a cut vocabulary has. One rule each, for what is made
and for what is predicted.
"""

from __future__ import annotations

ALIGN = 16
"""Elements: a shard starts on a cache line."""


def padded(numel: int, dp: int) -> int:
    """Elements of a buffer that holds ``numel`` and splits evenly over dp.

    A lone rank still pads to the alignment, so that the buffer does not depend on whether dp is 1.
    """
    step = dp * ALIGN
    return -(-numel // step) * step


def padded_vocab(vocab: int, parts: int) -> int:
    """Rows of the vocabulary matrices over all of ``parts`` ranks, or cells of exact mode.

    A vocabulary that splits evenly stays as it is. Another is padded until each part is a multiple of ``ALIGN``, so
    that products keep whole lanes. The rows beyond the vocabulary are zero and take part in nothing.
    """
    if vocab % parts == 0:
        return vocab
    step = parts * ALIGN
    return -(-vocab // step) * step

"""Padding: the length of a unit's flat buffer, and the rows of a cut vocabulary; one rule each, for buffers and
predictions.
"""

from __future__ import annotations

ALIGN = 16
"""Elements: a shard starts on a cache line."""


def pad(numel: int, dp: int) -> int:
    """Elements of a buffer that holds ``numel`` and splits evenly over dp.

    A single rank also pads to the alignment, so that the buffer does not depend on whether dp is 1.
    """
    step = dp * ALIGN
    return -(-numel // step) * step


def pad_vocab(vocab: int, parts: int) -> int:
    """Rows of the vocabulary matrices over all of ``parts`` ranks, or cells of exact mode.

    A vocabulary that splits evenly is not padded. Any other is padded until each part is a multiple of ``ALIGN``, so
    that products keep whole lanes. The added rows are zero and take part in nothing.
    """
    if vocab % parts == 0:
        return vocab
    step = parts * ALIGN
    return -(-vocab // step) * step

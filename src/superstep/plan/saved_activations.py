"""What kernels keep for the backward pass, or make and drop, beside what every one of them has to: mechanisms,
whoever's kernels do so.

The account of memory (``cost.program.memory.memory``) counts by these; ``engine.saved_activations`` says which of them
a run has.
"""

from __future__ import annotations

from dataclasses import dataclass

WIDEST_FLASH = 256
"""The widest heads that the flash kernel of a GPU takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """Of a run's kernels; as plain torch does, where nobody said otherwise.

    Attributes:
        silu: a feed-forward keeps silu of its gate beside both of its inputs. Else it is computed again of them.
        window_blocks: attention in a sliding window goes by blocks of queries, and keeps a mask and an output of each.
            Else each query has a range of keys, and what is kept is where that begins.
        expanded_keys: attention keeps keys and values once for each query head, as its kernel knows no grouped heads.
        exact_scores: exact mode's attention makes all scores of a chunk's queries at once, in both passes. Else it goes
            by blocks of keys, and keeps the log-sum-exp of each query; and a norm of heads sums its gradient at once.
        exact_products: a weight's gradient in exact mode is whole in fp32 before it is put on its grid, and a norm's is
            kept of every token. Else they are put there as they are made, from a copy of one factor in fp32.
        wide_logits: the loss makes numbers in fp32 of a chunk's logits. Else it computes in their place.
        rounded_products: products of 16-bit factors that are summed in fp32 are whole in 16 bits before.
    """

    silu: bool = True
    window_blocks: bool = True
    expanded_keys: bool = False
    exact_scores: bool = True
    exact_products: bool = True
    wide_logits: bool = True
    rounded_products: bool = False


PLAIN = SavedActivations()

"""What a run's kernels keep for the backward pass, or make and drop, beyond what every kernel must: by mechanism,
independent of who wrote them.

Memory is counted by these (``cost.program.memory``); ``engine.activations.saved_activations`` derives
them from a run's layers.
"""

from __future__ import annotations

from dataclasses import dataclass

WIDEST_FLASH = 256
"""The widest heads of a GPU's flash kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """The mechanisms of a run's kernels; by default those of plain torch.

    Attributes:
        silu: a feed-forward keeps silu of its gate beside both inputs; otherwise silu is computed again.
        window_blocks: attention in a sliding window goes by blocks of queries, and keeps a mask and an output of each.
        Otherwise each query has a range of keys, and only the range's begin is kept.
        expanded_keys: attention keeps keys and values once for each query head, as its kernel has no grouped heads.
        exact_scores: exact mode's attention makes all scores of a chunk's queries at once, in both passes. Otherwise it
        goes by blocks of keys, and keeps each query's log-sum-exp; and a norm of heads sums its gradient at once.
        exact_products: in exact mode, a weight's gradient is whole in fp32 before it is put on its grid, and a norm's
            is
        kept for every token. Otherwise each is put on the grid as it is made, from an fp32 copy of one factor.
        wide_logits: the loss makes fp32 numbers from a chunk's logits. Otherwise it computes in place.
        rounded_products: products of 16-bit factors that are summed in fp32 are first whole in 16 bits.
    """

    silu: bool = True
    window_blocks: bool = True
    expanded_keys: bool = False
    exact_scores: bool = True
    exact_products: bool = True
    wide_logits: bool = True
    rounded_products: bool = False


PLAIN = SavedActivations()

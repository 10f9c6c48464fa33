"""What kernels keep for the backward pass beside what every one of them has to: mechanisms, whoever's kernels do so.

The account of memory (``cost.program.memory``) counts by these, and whoever knows what a run computes with says them
(``runtime.kept``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Of a run's kernels; as plain torch does, where nobody said otherwise.

    Attributes:
        silu: a feed-forward keeps silu of its gate beside both of its inputs. Else it is computed again of them.
        window_blocks: attention in a sliding window goes by blocks of queries, and keeps a mask and an output of each.
            Else each query has a range of keys, and what is kept is where that begins.
    """

    silu: bool = True
    window_blocks: bool = True


PLAIN = Kept()

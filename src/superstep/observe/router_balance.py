"""How evenly a router spreads tokens over experts, from the counts of a run's reports."""

from __future__ import annotations

import math
from collections.abc import Sequence


def busiest(chosen: Sequence[int]) -> float:
    """The busiest expert's load over the mean load: 1 where all are equal, E where one expert has all."""
    return max(chosen) * len(chosen) / (sum(chosen) or 1)


def entropy(chosen: Sequence[int]) -> float:
    """The load's entropy in bits: log2 E where it is even, 0 where one expert has all."""
    shares = [count / sum(chosen) for count in chosen if count]
    return sum(-share * math.log2(share) for share in shares)


def share_dropped(chosen: Sequence[int], dropped: Sequence[int]) -> float:
    """The share of choices for which the expert had no room."""
    return sum(dropped) / (sum(chosen) or 1)

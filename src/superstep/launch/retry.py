"""How often a run is recovered after losses: one rule for one host and several."""

from __future__ import annotations

MOST_TRIES = 3
"""The most starts from one state."""


def next_try(tries: int, *, is_same_state: bool) -> int | None:
    """The number of the next start; None where the run makes no progress and ends.

    Args:
        tries: starts from the state of the last start.
        is_same_state: whether the next start is from that state; otherwise the count begins again.
    """
    following = tries + 1 if is_same_state else 1
    return following if following <= MOST_TRIES else None

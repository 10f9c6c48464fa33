"""How often a run is recovered after a loss: one rule, whether its ranks are on one host or on several."""

from __future__ import annotations

MOST_TRIES = 3
"""How often a run is started again from one and the same state."""


def next_try(tries: int, *, is_same_state: bool) -> int | None:
    """The number of the next start; None where the run ends instead, as it gets no further.

    Args:
        tries: starts from the state of the last start.
        is_same_state: whether the next start is from that state too; from another one they are counted anew.
    """
    following = tries + 1 if is_same_state else 1
    return following if following <= MOST_TRIES else None

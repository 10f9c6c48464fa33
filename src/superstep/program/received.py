"""Sent values that a rank knows to be received: its peer has sent an answer after using them.

On a GPU the host may be a whole step ahead. So the program alone tells when the memory of a sent value is free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from superstep.program.instructions import Program, Send
from superstep.program.needed_values import NeededValues, Value


def find_received_values(program: Program, rank: int) -> dict[int, tuple[Value, ...]]:
    """By an instruction's place: the rank's sent values that are received before it runs, if they are answered."""
    uses = {peer: _uses(program, peer) for peer in {rank, *(i.peer for i in _sends(program, rank).values())}}
    answers = {peer: _answers(program, peer, rank, uses[rank]) for peer in uses if peer != rank}
    received: dict[int, list[Value]] = defaultdict(list)
    for i in _sends(program, rank).values():
        value = (i.wire, i.unit, i.microbatch)
        places, known_at = answers[i.peer]
        answer = bisect_right(places, uses[i.peer][value])
        if answer < len(places):
            received[known_at[answer]].append(value)
    return {place: tuple(values) for place, values in received.items()}


def _sends(program: Program, rank: int) -> dict[int, Send]:
    return {place: i for place, i in enumerate(program.ranks[rank]) if isinstance(i, Send)}


def _uses(program: Program, rank: int) -> dict[Value, int]:
    """Where a rank first waits for a value."""
    first_uses: dict[Value, int] = {}
    needed = NeededValues(program)
    for place, i in enumerate(program.ranks[rank]):
        for value in needed(i):
            first_uses.setdefault(value, place)
    return first_uses


def _answers(program: Program, peer: int, rank: int, uses: dict[Value, int]) -> tuple[list[int], list[int]]:
    """The places of the peer's sends to the rank, and where the rank first waits for each or a later one."""
    sends = {place: i for place, i in _sends(program, peer).items() if i.peer == rank}
    first, known_at = len(program.ranks[rank]), []
    for i in reversed(sends.values()):
        first = min(first, uses[i.wire, i.unit, i.microbatch])
        known_at.append(first)
    return list(sends), known_at[::-1]

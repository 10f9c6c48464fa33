"""evict: what a rank gives up of the activations that it keeps, until it stays within a limit.

The pass of dynamic tensor rematerialization (Kirisame 2021) over a program whose instructions are known: it follows
them on the simulator's clock. Where one has no room, what a unit keeps of a microbatch is evicted that has the least

    h = cost / (bytes · staleness)

of all that is kept then. The input of a unit stays where it is computed again, so that no evicted neighbour is computed
with it. What was given up for an instruction that later evictions have made room for as well is kept again at the end.
DTR does not know what comes; a program does, and where its peaks lie far behind a weaker influence of staleness is
often better: so powers of it are tried, the evictions that cost least are taken, and the dearest of them are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from superstep.hardware.units import Array
from superstep.plan.config import Kept
from superstep.program.offload import Key

AGEING = (1.0, 0.25, 0.0)
"""Powers of staleness; the first is that of DTR."""
MOST_IMPROVED = 32
"""Evictions in the place of which others are tried at the end."""
TINY_S = 1e-9
"""Added to seconds that may be zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """A way to keep less of a unit and a microbatch.

    Attributes:
        choice: what is kept then.
        begin: the first instruction without the bytes.
        end: the first instruction with them again.
        bytes: that are free in between.
        extra_bytes: that the instruction ``end`` takes more.
        seconds: that the step takes longer.
    """

    choice: Kept
    begin: int
    end: int
    bytes: int
    extra_bytes: int = 0
    seconds: float


@dataclass(frozen=True, slots=True)
class KeptUnit:
    """What a unit keeps of a microbatch: the instruction that used it last before its backward pass, and what may be
    given up of it.
    """

    key: Key
    used: int
    evictions: tuple[Eviction, ...]


@dataclass(slots=True)
class _Rank:
    """The levels of a rank's memory at each instruction, in bytes, and what was evicted so far."""

    levels: Array
    limit_bytes: float
    chosen: dict[Key, Eviction] = field(default_factory=dict)

    def apply(self, eviction: Eviction | None, *, sign: int = 1) -> None:
        if eviction is not None:
            self.levels[eviction.begin : eviction.end] -= sign * eviction.bytes
            self.levels[eviction.end] += sign * eviction.extra_bytes

    def replace(self, key: Key, eviction: Eviction | None) -> None:
        self.apply(self.chosen.pop(key, None), sign=-1)
        self.apply(eviction)
        if eviction is not None:
            self.chosen[key] = eviction

    @property
    def seconds(self) -> float:
        return sum(eviction.seconds for eviction in self.chosen.values())

    @property
    def is_fitting(self) -> bool:
        return bool(self.levels.max(initial=0.0) <= self.limit_bytes)


def evict(levels: Array, clock_s: Array, kept: Sequence[KeptUnit], limit_bytes: float) -> dict[Key, Eviction] | None:
    """The evictions with which a rank stays within a limit, and which cost least; None where none are enough.

    Args:
        levels: bytes at each instruction with all kept.
        clock_s: when each instruction ends.
        kept: what may be evicted.
        limit_bytes: the most at any instruction.
    """
    tried = []
    for ageing in AGEING:
        rank = _Rank(levels.astype(np.float64), limit_bytes)
        if _make_room(rank, clock_s, kept, ageing):
            _keep_again(rank, kept)
            tried.append(rank)
    if not tried:
        return None
    best = min(tried, key=lambda rank: rank.seconds)
    return _improve(best, clock_s, kept).chosen


def _make_room(
    rank: _Rank, clock_s: Array, kept: Sequence[KeptUnit], ageing: float, but: frozenset[Key] = frozenset()
) -> bool:
    """Evict until the rank stays within its limit, but nothing of some units and microbatches; False if it cannot."""
    place = 0
    while len(over := np.flatnonzero(rank.levels[place:] > rank.limit_bytes)):
        place += int(over[0])
        ages = [max(clock_s[place] - clock_s[unit.used], TINY_S) ** ageing for unit in kept]
        candidates = [
            (_score(rank.chosen.get(unit.key), eviction, ages[number]), number, eviction)
            for number, unit in enumerate(kept)
            for eviction in unit.evictions
            if eviction.begin <= place < eviction.end and unit.key not in but
        ]
        least, number, eviction = min(candidates, key=lambda one: one[:2], default=(np.inf, 0, None))
        if eviction is None or least == np.inf:
            return False
        rank.replace(kept[number].key, eviction)
    return True


def _improve(best: _Rank, clock_s: Array, kept: Sequence[KeptUnit]) -> _Rank:
    """Keep one of the dearest evictions after the other, with other evictions in its place where they cost less."""
    dearest = sorted(best.chosen, key=lambda key: -best.chosen[key].seconds)[:MOST_IMPROVED]
    for key in dearest:
        for ageing in AGEING:
            rank = _Rank(best.levels.copy(), best.limit_bytes, dict(best.chosen))
            rank.replace(key, None)
            if _make_room(rank, clock_s, kept, ageing, but=frozenset({key})):
                _keep_again(rank, kept)
                best = min(best, rank, key=lambda one: one.seconds)
    return best


def _score(now: Eviction | None, eviction: Eviction, age: float) -> float:
    """h of an eviction in the place of one that was chosen; infinite where it does not free more, and as long."""
    if now is None:
        return (eviction.seconds + TINY_S) / (eviction.bytes * age)
    if eviction.bytes <= now.bytes or eviction.begin > now.begin or eviction.end < now.end:
        return np.inf
    cost_s = max(eviction.seconds - now.seconds, TINY_S)
    return cost_s / ((eviction.bytes - now.bytes) * age)


def _keep_again(rank: _Rank, kept: Sequence[KeptUnit]) -> None:
    """Evict less where it fits, the dearest evictions first."""
    by_key = {unit.key: unit for unit in kept}
    for key, now in sorted(rank.chosen.items(), key=lambda item: -item[1].seconds):
        cheaper = sorted((e for e in by_key[key].evictions if e.seconds < now.seconds), key=lambda e: e.seconds)
        for other in (None, *cheaper):
            rank.replace(key, other)
            if rank.is_fitting:
                break
            rank.replace(key, now)

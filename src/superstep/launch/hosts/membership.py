"""Membership: the hosts that train together, for which of them states are cut, and which states can be had.

cut     epoch 1, hosts 0 1 2        each host keeps its own ranks' part, and a copy of that of the host before it
host 1 is lost
parts   0: host 0 ─ 1: host 2 has the copy ─ 2: host 2
cut     epoch 3, hosts 0 2          other parts: what was cut before means nothing to them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from superstep.state.snapshots.memory_snapshot import State


@dataclass(frozen=True, slots=True)
class CopyPlacement:
    """How states are shared out over hosts.

    Attributes:
        epoch: in which it was first so; 0 of the first of a run.
        hosts: those that train, in the order of their ranks; empty stands for all.
    """

    epoch: int = 0
    hosts: tuple[int, ...] = ()

    def crew(self, count: int) -> tuple[int, ...]:
        """Its hosts, of so many in all."""
        return self.hosts or tuple(range(count))


ALL = CopyPlacement()
"""The first cut of a run with all of its hosts, which most runs keep."""


@dataclass(frozen=True, slots=True)
class HeldStates:
    """States that are whole in a host's memory.

    Attributes:
        own: of its own ranks.
        copies: of the ranks of the host before it, the last host's for the first.
        cut: that they are parts of.
    """

    own: frozenset[State] = frozenset()
    copies: frozenset[State] = frozenset()
    cut: CopyPlacement = ALL


def newest(held: Mapping[int, HeldStates], crew: Sequence[int]) -> State | None:
    """The newest state of which every part can be had: from the memory of each host, or from the next one's copy.

    Args:
        held: by host, of those that are here; all of one cut.
        crew: the hosts of that cut.
    """
    nothing = HeldStates()
    own = [held.get(host, nothing).own for host in crew]
    copies = [held.get(neighbour(host, crew), nothing).copies for host in crew] if len(crew) > 1 else [frozenset()]
    can = (mine | copied for mine, copied in zip(own, copies, strict=True))
    return max(frozenset.intersection(*can), default=None)


def sources(held: Mapping[int, HeldStates], crew: Sequence[int], state: State) -> tuple[int, ...]:
    """Of each host of a crew, who has its part of a state, of which every part can be had."""
    return tuple(host if host in held and state in held[host].own else neighbour(host, crew) for host in crew)


def neighbour(host: int, crew: Sequence[int]) -> int:
    """Who has the copies of a host."""
    return crew[(crew.index(host) + 1) % len(crew)]


def largest(here: Sequence[int], sizes: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """The hosts that shall train, of those that are here; empty where no plan is for so few.

    Args:
        here: in order.
        sizes: how many hosts the plans are for.
        before: those that trained: they stay.
    """
    count = max((size for size in sizes if size <= len(here)), default=0)
    return tuple(sorted(sorted(here, key=lambda host: (host not in before, host))[:count]))

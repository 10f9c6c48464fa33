"""Membership: the hosts that train together, how states are divided over them, and which states are available.

cut     epoch 1, hosts 0 1 2        each host keeps its own ranks' part, and a copy of that of the host before it
host 1 is lost
parts   0: host 0 ─ 1: host 2 has the copy ─ 2: host 2
cut     epoch 3, hosts 0 2          other parts: the earlier cut's parts are of no use
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from superstep.state.snapshots.memory_snapshot import State


@dataclass(frozen=True, slots=True)
class CopyPlacement:
    """How states are divided over hosts.

    Attributes:
        epoch: the first with this cut; 0 for a run's first.
        hosts: those that train, in the order of their ranks; empty means all.
    """

    epoch: int = 0
    hosts: tuple[int, ...] = ()

    def crew(self, count: int) -> tuple[int, ...]:
        """The hosts of the cut; ``count`` is the number of all hosts."""
        return self.hosts or tuple(range(count))


ALL = CopyPlacement()
"""The first cut of a run with all of its hosts; most runs keep it."""


@dataclass(frozen=True, slots=True)
class HeldStates:
    """States that are complete in a host's memory.

    Attributes:
        own: of its own ranks.
        copies: of the ranks of the host before it; the first host copies the last.
        cut: which these are parts of.
    """

    own: frozenset[State] = frozenset()
    copies: frozenset[State] = frozenset()
    cut: CopyPlacement = ALL


def newest(held: Mapping[int, HeldStates], crew: Sequence[int]) -> State | None:
    """The newest state of which every part is available: in its host's memory, or as the next host's copy.

    Args:
        held: by present host; all of one cut.
        crew: the hosts of that cut.
    """
    nothing = HeldStates()
    own = [held.get(host, nothing).own for host in crew]
    copies = [held.get(neighbour(host, crew), nothing).copies for host in crew] if len(crew) > 1 else [frozenset()]
    can = (mine | copied for mine, copied in zip(own, copies, strict=True))
    return max(frozenset.intersection(*can), default=None)


def sources(held: Mapping[int, HeldStates], crew: Sequence[int], state: State) -> tuple[int, ...]:
    """For each host of a crew, the holder of its part of an available state."""
    return tuple(host if host in held and state in held[host].own else neighbour(host, crew) for host in crew)


def neighbour(host: int, crew: Sequence[int]) -> int:
    """The host that has the copies of ``host``."""
    return crew[(crew.index(host) + 1) % len(crew)]


def largest(here: Sequence[int], sizes: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """The hosts that should train; empty where no plan fits so few.

    Args:
        here: the present hosts, in order.
        sizes: numbers of hosts that have plans.
        before: those that trained; they stay.
    """
    count = max((size for size in sizes if size <= len(here)), default=0)
    return tuple(sorted(sorted(here, key=lambda host: (host not in before, host))[:count]))

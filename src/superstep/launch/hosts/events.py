"""What the coordinator of several hosts hears of, and what it orders, as ``launch.hosts.coordinator_state`` decides."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.launch.hosts.membership import ALL, CopyPlacement, HeldStates
from superstep.state.snapshots.memory_snapshot import State


@dataclass(frozen=True, slots=True)
class Cause:
    """Why ranks are ended.

    Attributes:
        text: in words, with rank and host.
        is_lost: whether a rank or a host was lost, which a restart mends.
        is_mistake: whether it is the user's.
        is_gain: whether nothing is lost, and a host has come.
        order: the first cause of several comes first in it, as ``launch.failure`` has it.
        at_s: when it was seen, in seconds of the lead's clock.
        saved_in: where the state of the run is saved, where its directory was moved or removed; else empty.
    """

    text: str
    is_lost: bool = False
    is_mistake: bool = False
    is_gain: bool = False
    order: int = 1
    at_s: float = 0.0
    saved_in: str = ""


@dataclass(frozen=True, slots=True)
class Came:
    """A host is here, for the first time or again; it has seen an epoch."""

    host: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class HostLeft:
    """A host is gone."""

    host: int
    why: str


@dataclass(frozen=True, slots=True)
class Holds:
    """A host has no ranks, and holds this."""

    host: int
    held: HeldStates


@dataclass(frozen=True, slots=True)
class Troubled:
    """Ranks of a host are ended, for this."""

    host: int
    epoch: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class RanksDone:
    """All ranks of a host have come to their end."""

    host: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; ``newest`` is the step whose state is whole in host 0's memory."""

    newest: int = 0


Event = Came | HostLeft | Holds | Troubled | RanksDone | Tick


@dataclass(frozen=True, slots=True)
class FetchState:
    """A host shall have a state of its ranks back from the host that has the copy."""

    host: int
    source: int
    state: State
    cut: CopyPlacement = ALL


@dataclass(frozen=True, slots=True)
class Go:
    """Hosts start their ranks: from this state; None means from the newest checkpoint, or from the start.

    Attributes:
        epoch: of these ranks.
        state: in memory.
        lost: why ranks before them were ended.
        cut: of what they have in memory from now on; of ``state``.
        sources: where they only write ``state`` down, who has the part of each host of the cut; else empty.
    """

    epoch: int
    state: State | None
    lost: Cause | None
    cut: CopyPlacement = ALL
    sources: tuple[int, ...] = ()

    def crew(self, count: int) -> tuple[int, ...]:
        """The hosts that have ranks, of so many in all, in the order of their ranks."""
        return tuple(sorted(set(self.sources))) or self.cut.crew(count)


@dataclass(frozen=True, slots=True)
class AbortAll:
    """All hosts end their ranks."""

    epoch: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Over:
    """The run has ended, by itself where there is no cause."""

    cause: Cause | None = None


Order = FetchState | Go | AbortAll | Over

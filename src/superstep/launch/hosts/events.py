"""Events that the coordinator of several hosts receives, and its orders; see ``launch.hosts.coordinator_state``.

Those that go between hosts are structs, whose names tell them apart in a message; the others stay in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from superstep.launch.hosts.membership import ALL, CopyPlacement, HeldStates
from superstep.state.snapshots.memory_snapshot import State


@dataclass(frozen=True, slots=True)
class Cause:
    """Why ranks are ended.

    Attributes:
        text: with rank and host.
        is_lost: whether a rank or a host was lost, so that a restart helps.
        is_mistake: whether it is the user's mistake.
        is_gain: whether nothing is lost and a host has come.
        order: see ``launch.failure``.
        at_s: on the lead's clock.
        saved_in: where the state is saved if the run directory was moved or removed; else empty.
    """

    text: str
    is_lost: bool = False
    is_mistake: bool = False
    is_gain: bool = False
    order: int = 1
    at_s: float = 0.0
    saved_in: str = ""


class HostJoined(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A host has come, for the first time or again; ``epoch`` is its last."""

    host: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class HostLeft:
    host: int
    why: str


class HostHolds(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A host has no ranks, and holds these states."""

    host: int
    held: HeldStates


class HostFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A host's ranks are ended because of this."""

    host: int
    epoch: int
    cause: Cause


class RanksDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All ranks of a host have finished."""

    host: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; ``newest`` is the step whose state is complete in host 0's memory."""

    newest: int = 0


HostEvent = HostJoined | HostHolds | HostFailed | RanksDone
"""Events that a host's launcher reports."""

Event = HostEvent | HostLeft | Tick


@dataclass(frozen=True, slots=True)
class FetchState:
    """A host fetches the state of its ranks from the host with the copy."""

    host: int
    source: int
    state: State
    cut: CopyPlacement = ALL


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Hosts start their ranks from this state; None means the newest checkpoint, or the start.

    Attributes:
        lost: why the ranks before them were ended.
        cut: of the states that they keep from now on; of ``state`` too.
        sources: where they only save ``state``, the holder of each host's part; else empty.
    """

    epoch: int
    state: State | None
    lost: Cause | None
    cut: CopyPlacement = ALL
    sources: tuple[int, ...] = ()

    def crew(self, count: int) -> tuple[int, ...]:
        """The hosts that have ranks, in the order of their ranks; ``count`` is the number of all hosts."""
        return tuple(sorted(set(self.sources))) or self.cut.crew(count)


class AbortAll(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All hosts end their ranks."""

    epoch: int
    cause: Cause


class RunOver(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The run has ended; without a cause, normally."""

    cause: Cause | None = None


Order = FetchState | StartRanks | AbortAll | RunOver

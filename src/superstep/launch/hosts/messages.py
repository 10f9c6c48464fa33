"""Messages between launchers of several hosts: a struct for each kind, told apart by its name.

member ──► lead     Hello, then: HostJoined, HostHolds, HostFailed, RanksDone, and a MemberBeat four times a second
lead ──► member     Welcome, Refused or NotNow, then: Orders, Fetching, AbortAll, RunOver, and a LeadBeat as often
neighbours          Hello, Welcome, then the copies of ``launch.hosts.state_transfer``

A message with another name, a missing or unknown field or a value of another type is refused where it is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from superstep.comm.codec import Codec
from superstep.errors import Fault
from superstep.launch.hosts.copy_schedule import CopySteps, HostProgress
from superstep.launch.hosts.events import AbortAll, HostEvent, RunOver, StartRanks
from superstep.launch.hosts.membership import ALL, CopyPlacement
from superstep.state.snapshots.memory_snapshot import State

F = TypeVar("F")

BEAT_S = 0.25
"""Seconds between heartbeats."""

SILENT_S = 2.5
"""The longest silence; with the heartbeat before, a loss is reported within three seconds."""

Address = tuple[str, int]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Who connects, and what for.

    Attributes:
        purpose: join the run; or bring a copy of this host's states, or fetch one, from a neighbour.
        host, hosts: its number, and the number of hosts.
        run: a hash of its run's configuration.
        version: of this package.
        process: a random name of its process.
        port: where it listens for copies.
    """

    purpose: Literal["join", "copy", "fetch"]
    host: int
    hosts: int
    run: str
    version: str
    process: str
    port: int


class Welcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to a hello that is let in."""


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to a hello that does not belong here; a retry does not help."""

    why: str


class NotNow(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to a hello that may try again."""

    why: str


class Orders(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A ``StartRanks`` with what ranks need to start.

    Attributes:
        store: where the process group meets.
        facts: the lead's facts of the run, encoded by the kind of run.
        next: number and address of the host that has this host's copies; None without copies.
    """

    go: StartRanks
    store: Address
    facts: bytes
    next: Address | None

    def facts_of(self, codec: Codec[F]) -> F:
        """The facts of the run; raises Fault where they are of another kind."""
        try:
            return codec.decode(self.facts)
        except msgspec.DecodeError as error:
            raise Fault(f"host 0 sent other facts of the run than this version reads ({error}).") from error


class Fetching(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A ``FetchState`` with the address."""

    state: State
    source: Address
    cut: CopyPlacement = ALL


class MemberBeat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A member's heartbeat, and how far its states are copied; None without ranks."""

    progress: HostProgress | None = None


class LeadBeat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The lead's heartbeat, and what all hosts copy next; None where nothing is copied."""

    steps: CopySteps | None = None


@dataclass(frozen=True, slots=True)
class LeadLost:
    """The lead is gone; the member tries to reach it again."""

    why: str


@dataclass(frozen=True, slots=True)
class LeadReached:
    """The lead is there."""


SentOrder = Orders | Fetching | AbortAll | RunOver
Order = SentOrder | LeadLost | LeadReached
"""Orders to a host's launcher; the last two come from its own member."""

HELLO: Codec[Hello] = Codec(Hello)
WELCOME: Codec[Welcome | Refused | NotNow] = Codec(Welcome | Refused | NotNow)
FROM_MEMBER: Codec[HostEvent | MemberBeat] = Codec(HostEvent | MemberBeat)
FROM_LEAD: Codec[SentOrder | LeadBeat] = Codec(SentOrder | LeadBeat)


class Silence:
    """How long the other side was silent. Time in which this process was not running does not count."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self.seconds = 0.0

    def note_message(self) -> None:
        self.seconds = 0.0

    def look(self, now_s: float) -> bool:
        """Whether the silence is too long; called once for each heartbeat."""
        self.seconds += min(now_s - self._looked_s, 2 * BEAT_S)
        self._looked_s = now_s
        return self.seconds >= SILENT_S

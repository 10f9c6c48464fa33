"""Messages between launchers of several hosts, as JSON and as values.

member ──► lead     hello, then: came, holds, troubled, done, and a heartbeat four times a second
lead ──► member     welcome or refused, then: fetch, go, abort, over, and a heartbeat four times a second
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from superstep.launch.hosts.events import (
    AbortAll,
    Cause,
    Event,
    HostFailed,
    HostHolds,
    HostJoined,
    RanksDone,
    RunOver,
    StartRanks,
)
from superstep.launch.hosts.membership import ALL, CopyPlacement, HeldStates
from superstep.state.snapshots.memory_snapshot import State

BEAT_S = 0.25
"""Seconds between heartbeats."""

SILENT_S = 2.5
"""The longest silence; with the heartbeat before, a loss is reported within three seconds."""

Message = dict[str, Any]
Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who connects, and what for.

    Attributes:
        purpose: join the run; or bring a copy of this host's states, or fetch one, from a neighbour.
        host, hosts: its number, and the number of hosts.
        run: a hash of its run's configuration.
        version: of this package.
        process: a random name of its process.
        port: where it listens for copies.
    """

    purpose: str
    host: int
    hosts: int
    run: str
    version: str
    process: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """A ``StartRanks`` with what ranks need to start.

    Attributes:
        store: where the process group meets.
        facts: plain values of the run, found by the lead.
        next: number and address of the host that has this host's copies; None without copies.
    """

    go: StartRanks
    store: Address
    facts: Message
    next: Address | None


@dataclass(frozen=True, slots=True)
class Fetching:
    """A ``FetchState`` with the address."""

    state: State
    source: Address
    cut: CopyPlacement = ALL


@dataclass(frozen=True, slots=True)
class LeadLost:
    """The lead is gone; the member tries to reach it again."""

    why: str


@dataclass(frozen=True, slots=True)
class LeadReached:
    """The lead is there."""


Order = Orders | Fetching | AbortAll | RunOver | LeadLost | LeadReached
"""Orders to a host's launcher."""


def event_message(event: Event) -> Message:
    match event:
        case HostJoined(_, epoch):
            return {"say": "came", "epoch": epoch}
        case HostHolds(_, held):
            parts = {"own": sorted(held.own), "copies": sorted(held.copies)}
            return {"say": "holds", "cut": asdict(held.cut)} | parts
        case HostFailed(_, epoch, cause):
            return {"say": "troubled", "epoch": epoch, "cause": asdict(cause)}
        case RanksDone(_, epoch):
            return {"say": "done", "epoch": epoch}
        case _:
            raise TypeError(f"{event} is not told")


def event_of(host: int, message: Mapping[str, Any]) -> Event:
    """Read a member's event; raises KeyError, TypeError or ValueError for anything else."""
    match message["say"]:
        case "came":
            return HostJoined(host, int(message["epoch"]))
        case "holds":
            return HostHolds(
                host, HeldStates(_states(message["own"]), _states(message["copies"]), _cut(message["cut"]))
            )
        case "troubled":
            return HostFailed(host, int(message["epoch"]), Cause(**message["cause"]))
        case "done":
            return RanksDone(host, int(message["epoch"]))
        case other:
            raise ValueError(f"'{other}' is told by nobody")


def _states(raw: list[list[int]]) -> frozenset[State]:
    return frozenset((int(step), int(turn)) for step, turn in raw)


def order_message(order: Order) -> Message:
    match order:
        case Orders():
            return {"say": "go"} | asdict(order)
        case Fetching():
            return {"say": "fetch"} | asdict(order)
        case AbortAll(epoch, cause):
            return {"say": "abort", "epoch": epoch, "cause": asdict(cause)}
        case RunOver(cause):
            return {"say": "over", "cause": None if cause is None else asdict(cause)}
        case _:
            raise TypeError(f"{order} is not told")


def order_of(message: Mapping[str, Any]) -> Order:
    """Read the lead's order; raises KeyError, TypeError or ValueError for anything else."""
    match message["say"]:
        case "go":
            go, at = message["go"], message["next"]
            orders = StartRanks(
                int(go["epoch"]),
                _state(go["state"]),
                _cause(go["lost"]),
                _cut(go["cut"]),
                tuple(int(host) for host in go["sources"]),
            )
            return Orders(
                go=orders,
                store=_address(message["store"]),
                facts=dict(message["facts"]),
                next=None if at is None else _address(at),
            )
        case "fetch":
            state = _state(message["state"])
            assert state is not None
            return Fetching(state, _address(message["source"]), _cut(message["cut"]))
        case "abort":
            return AbortAll(int(message["epoch"]), Cause(**message["cause"]))
        case "over":
            return RunOver(_cause(message["cause"]))
        case other:
            raise ValueError(f"'{other}' is no order")


def _state(raw: list[int] | None) -> State | None:
    return None if raw is None else (int(raw[0]), int(raw[1]))


def _cut(raw: Mapping[str, Any]) -> CopyPlacement:
    return CopyPlacement(int(raw["epoch"]), tuple(int(host) for host in raw["hosts"]))


def _cause(raw: dict[str, Any] | None) -> Cause | None:
    return None if raw is None else Cause(**raw)


def _address(raw: list[Any]) -> Address:
    return str(raw[0]), int(raw[1])


class Silence:
    """How long the other side was silent. Time in which this process was not running does not count."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self.seconds = 0.0

    def heard(self) -> None:
        self.seconds = 0.0

    def look(self, now_s: float) -> bool:
        """Whether the silence is too long; called once for each heartbeat."""
        self.seconds += min(now_s - self._looked_s, 2 * BEAT_S)
        self._looked_s = now_s
        return self.seconds >= SILENT_S

"""Launches ranks as child processes on this host; ``launch.torchrun`` joins ranks that torchrun has started.

    launcher ──► seed ──forks──► rank 0, rank 1, ...    each reports once: its value, or why it has none
        │ first trouble
        ├── waits GRACE_S for the other reports: the first cause is among them, the rest follow from it
        ├── or finds that a rank is stopped or hangs, which reports nothing, and does not wait
        └── ends the remaining ranks: rank 0, which may use a terminal, gently at first

SIGTERM is passed on to the ranks, which may stop in their own time; a second one ends them. Only a launch on the main
thread handles it. A rank's stderr goes to a file: where one rank fails, torch and Gloo print pages about broken
connections, and the launcher reports the cause in one line. A rank ends with its launcher, however that ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from superstep.comm.device import Device, choose, pick
from superstep.errors import Fault, RankLost
from superstep.launch.failure import RankFailure, trouble_of
from superstep.launch.fork_server import LauncherState, context_of, place_at, stderr_away
from superstep.launch.process_handle import ProcessHandle
from superstep.launch.rank_process import END, END_S, RankProcess, RankWatch, end_all, output_of, pass_on
from superstep.launch.rendezvous import TIMEOUT, LaunchStore, RankSlot, Rendezvous
from superstep.launch.stack_dump import answering, own_heart
from superstep.launch.stop_request import STOPPED, StopRequest, listening
from superstep.launch.temporary_folders import temporary_folder
from superstep.monitor.status_page import HeartbeatReceiver, HeartbeatWriter, NoHeartbeats, page
from superstep.monitor.stopped_process import LOOK_S
from superstep.plan.config import DeviceKind

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

GRACE_S = 1.0
"""Seconds for the other ranks to report after a failure: they notice within milliseconds, or never."""

LOST_GRACE_S = 0.25
"""The same after a kill: another rank's report may explain it, but a recovery should not wait."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class World:
    """The launched ranks, seen from one of them.

    Attributes:
        rank: this rank's number.
        size: their count.
        device: where this rank computes.
        stop: whether this rank was asked to stop.
        store: shared by all worlds of this launch; None where the rank is the launcher.
        heart: receives what this rank does, for its launcher.
    """

    rank: int
    size: int
    device: Device
    stop: StopRequest = field(default_factory=StopRequest)
    store: LaunchStore | None = None
    heart: HeartbeatReceiver = field(default_factory=NoHeartbeats)


Worker = Callable[Concatenate[World, P], T]


def launch(world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``launch_on`` the GPUs of this host if it has any, else its CPU."""
    return launch_on(None, world, worker, *args, **kwargs)


def launch_on(wanted: DeviceKind | None, world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``worker(World, ...)`` on every rank, each in its own process; a single rank on the CPU runs in this process.

    This process does not touch GPUs, which would take memory from ranks. Returns what rank 0 returned.

    Raises:
        UserError, Fault: the first cause, as its rank reported it. No rank is left.
        SystemExit: SIGTERM came while the ranks did not listen to it, or came twice.
    """
    kind = choose(wanted, world)
    if world == 1 and kind == "cpu":
        store = dist.HashStore()  # type: ignore[attr-defined]
        device = pick(0, kind)
        dist.init_process_group(device.backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
        try:
            with own_heart(0, device) as heart:
                return worker(World(0, 1, device, heart=heart), *args, **kwargs)
        finally:
            dist.destroy_process_group()
    return launch_apart(kind, world, worker, *args, **kwargs)


def launch_apart(kind: DeviceKind, world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``launch_on`` a kind of device, with a process of its own also for a single rank. Any thread may call it."""
    return launch_from(0, kind, world, worker, *args, **kwargs)


def launch_from(first: int, kind: DeviceKind, world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``launch_apart`` beside other ranks of this host, which have the GPUs before ``first``."""
    value: T = launch_parties(kind, [RankWorld(size=world, worker=worker, args=args, kwargs=kwargs)], first)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWorld:
    """Ranks of one world, launched beside those of other worlds.

    Attributes:
        size: how many are launched here.
        args, kwargs: for the worker, after its ``World``.
        name: the prefix of their faults.
        meeting: where ranks on other hosts join, if any.
    """

    size: int
    worker: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    meeting: Rendezvous | None = None

    def seat(self, number: int, file: Path) -> RankSlot:
        """The slot of a rank, by its number among those launched here."""
        first, world = (0, self.size) if self.meeting is None else (self.meeting.first, self.meeting.world)
        return RankSlot(first + number, world, self.name, file, self.meeting, is_first=number == 0)


def launch_parties(
    kind: DeviceKind, parties: Sequence[RankWorld], first: int = 0, cut: Connection | None = None
) -> Any:  # noqa: ANN401
    """Launch several worlds at once; they end together, at the first trouble of any.

    Args:
        kind: each rank has its own GPU, in the order of the parties.
        parties: rank 0 of the first may use a terminal.
        first: GPUs before it belong to others.
        cut: ends the ranks as soon as something can be read from it.

    Returns:
        What rank 0 of the first party returned; None where the ranks were cut off before. Raises like ``launch_on``.
    """
    with (
        temporary_folder("superstep-launch-") as folder,
        _ranks(parties, kind, folder, first) as ranks,
    ):
        stop = StopRequest()
        with listening(stop, lambda: pass_on(ranks)):
            value, trouble = _collect(ranks, cut)
            if trouble is None:
                return value
            if stop.is_requested and trouble.order == 1:
                raise SystemExit(STOPPED)
            raise trouble.error


def launch_here(
    kind: DeviceKind, parties: Sequence[RankWorld], cut: Connection, on_trouble: Callable[[RankFailure], None]
) -> tuple[Any, bool]:
    """Launch this host's ranks of worlds on several hosts.

    Args:
        parties: have a meeting each.
        cut: ends the ranks as soon as it is readable.
        on_trouble: called with the reason before ranks are ended, if this host knows it.

    Returns:
        What the first of them returned, and whether all ranks of this host finished.
    """
    with (
        temporary_folder("superstep-launch-") as folder,
        _ranks(parties, kind, folder) as ranks,
    ):
        stop = StopRequest()
        with listening(stop, lambda: pass_on(ranks)):
            value, trouble = _collect(ranks, cut, is_whole=False)
            if trouble is not None:
                if stop.is_requested and trouble.order == 1:
                    raise SystemExit(STOPPED)
                on_trouble(trouble)
    return value, trouble is None and not cut.poll()


@contextlib.contextmanager
def _ranks(parties: Sequence[RankWorld], kind: DeviceKind, folder: Path, first: int = 0) -> Iterator[list[RankProcess]]:
    """The processes of all ranks; none is left when the block ends."""
    context = context_of(parties[0].worker)
    calls = [pickle.dumps((party.worker, party.args, party.kwargs)) for party in parties]
    places = [(at, number) for at, party in enumerate(parties) for number in range(party.size)]
    ranks: list[RankProcess] = []
    try:
        with _signals_deferred():
            for nth, (at, number) in enumerate(places):  # each is known even if a later one fails
                ranks.append(_start(context, parties[at], number, kind, folder / f"store-{at}", nth, first))
        for rank, (at, _) in zip(ranks, places, strict=True):
            with contextlib.suppress(OSError):  # one that has died already is found out by its silence
                rank.pipe.send_bytes(calls[at])
        yield ranks
    finally:
        with _signals_deferred():
            end_all(ranks)


def _start(
    context: BaseContext, party: RankWorld, number: int, kind: DeviceKind, store: Path, nth: int, first: int
) -> RankProcess:
    """Start a rank: ``number`` in its party, the ``nth`` of all."""
    seat = party.seat(number, store)
    ours, theirs = context.Pipe()
    heart = page(f"{party.name}:{seat.rank}")
    # Of a launcher in another thread the main one is told to end, and ends the launch.
    heeds = threading.current_thread() is threading.main_thread()
    place = place_at(store.with_name(f"stderr-{nth}"), None if heart is None else heart.handle, heeds_signals=heeds)
    process = context.Process(  # type: ignore[attr-defined]
        target=_serve,
        args=(theirs, place, seat, kind, store.parent, first + nth),
        name=f"{party.name} rank {seat.rank}".strip(),
    )
    try:
        with stderr_away():
            process.start()
    except (OSError, EOFError) as error:
        lost = RankLost(f"the process cannot be started: {error}.", rank=seat.rank)
        lost.at_s = time.time()
        raise lost from error
    theirs.close()
    host = os.uname().nodename if party.meeting is None else party.meeting.host
    handle = ProcessHandle(process)
    return RankProcess(party.name, seat.rank, host, nth == 0, handle, ours, place.stderr, heart)


def _collect(
    ranks: Sequence[RankProcess], cut: Connection | None, *, is_whole: bool = True
) -> tuple[Any, RankFailure | None]:
    """Wait for every report: rank 0's value, and the first cause of failure. Once ``cut`` is readable, wait only for
    reports that are being sent. ``is_whole`` says that no rank is another host's.
    """
    waiting = {rank.pipe: rank for rank in ranks}
    troubles: list[RankFailure] = []
    deadline_s = float("inf")
    attending = RankWatch(is_whole=is_whole)
    value = None
    ends: list[Connection] = [] if cut is None else [cut]
    while waiting and time.monotonic() < deadline_s:
        lost = attending.look(list(waiting.values()))
        if lost is not None:
            troubles.append(lost)
            break
        for pipe in wait([*waiting, *ends], min(LOOK_S, max(0.0, deadline_s - time.monotonic()))):
            assert isinstance(pipe, Connection)
            if pipe is cut:
                ends.clear()
                deadline_s = min(deadline_s, time.monotonic() + LOST_GRACE_S)
                continue
            rank = waiting.pop(pipe)
            try:
                report = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                report = rank.death()
            if isinstance(report, RankFailure):
                troubles.append(rank.add_party(report))
                grace_s = LOST_GRACE_S if isinstance(report.error, RankLost) else GRACE_S
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
            elif rank.is_first:
                (value,) = report
    if troubles:
        first = min(troubles, key=lambda trouble: (trouble.order, trouble.at_s))
        if isinstance(first.error, Fault):
            first.error.record = output_of(ranks, first.error)
        return value, first
    if waiting:
        return value, None
    # A rank that has reported ends by itself: its groups are given back in an order that all keep.
    for rank in ranks:
        rank.process.join(END_S)
    return value, None


def _serve(pipe: Connection, place: LauncherState, seat: RankSlot, kind: DeviceKind, folder: Path, number: int) -> None:
    """Run a rank's process: one call, one report. ``number`` selects its GPU."""
    place.take()
    # Ctrl-C reaches every process of the terminal; the launcher alone acts on it, and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_launcher, args=((folder, place.sockets),), daemon=True).start()
    # Cores are shared out by running one rank on each; more threads would only fight over them.
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # a launcher that has gone wants no report
        try:
            worker, args, kwargs = pickle.loads(pipe.recv_bytes())
            device = pick(number, kind)
            store = seat.take(device)
            if seat.rank == 0:
                signal.signal(END, _leave)
            heart = (
                NoHeartbeats()
                if place.heart is None
                else answering(HeartbeatWriter(place.heart, marks=device.stream_marks()))
            )
            value = worker(World(seat.rank, seat.world, device, store=store, heart=heart), *args, **kwargs)
            dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001 - whatever ended the rank must reach the launcher
            # Reported before this process ends, and with it the connections that others will miss.
            pipe.send_bytes(pickle.dumps(trouble_of(seat.rank, error)))
        else:
            pipe.send_bytes(pickle.dumps((value if seat.is_first else None,)))


def _leave(number: int, frame: FrameType | None) -> None:
    # Rank 0 holds the terminal: an exception gives it back on the way out.
    raise SystemExit(STOPPED)


def _follow_launcher(folders: Sequence[Path]) -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), END)
    time.sleep(END_S)
    os._exit(1)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer Ctrl-C and similar signals to the end of the block: a rank that is not yet recorded could not be ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])

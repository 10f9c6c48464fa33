"""Launching ranks as processes of this one on this host; ``launch.torchrun`` joins those of torchrun.

    launcher ──► seed ──forks──► rank 0, rank 1, ...    each reports once: its value, or why it has none
        │ first trouble
        ├── waits GRACE_S for the other reports: the first cause is among them, the rest follows from it
        ├── or sees that a rank is stopped or hangs, which reports nothing, and waits for nobody
        └── ends the ranks that are left: rank 0, which may hold a terminal, gently at first

SIGTERM is passed on to the ranks, who may stop in their own time; a second one ends them. Ranks that a thread beside
the main one has launched leave it to that.

What a rank writes to stderr goes to a file, from its first line on: where one rank fails, torch and Gloo print pages
about the connections that break, and the launcher says the cause in one line. A rank ends with its launcher, however
that ended.
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
from superstep.errors import Fault, Lost
from superstep.launch.failure import Trouble, trouble_of
from superstep.launch.fork_server import LauncherState, context_of, place_at, stderr_away
from superstep.launch.process_handle import ProcessHandle
from superstep.launch.rank_process import END, END_S, Attending, RankProcess, end_all, output_of, pass_on
from superstep.launch.rendezvous import TIMEOUT, Meeting, RankSlot
from superstep.launch.stack_dump import answering, own_heart
from superstep.launch.stop_request import STOPPED, Stop, listening
from superstep.launch.temporary_folders import temporary_folder
from superstep.monitor.status_page import Beats, Heart, Unwatched, page
from superstep.monitor.stopped_process import LOOK_S
from superstep.plan.config import DeviceKind

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

GRACE_S = 1.0
"""Once a rank has failed, how long the others have to report too: they notice within milliseconds, or never."""

LOST_GRACE_S = 0.25
"""Where one was killed: it may have been for what another will say, but a run that is recovered is not to wait."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class World:
    """The launched ranks, seen from one of them.

    Attributes:
        rank: this one's number.
        size: how many there are.
        device: where this one computes.
        stop: whether it was asked to stop.
        folder: of this launch, where parties meet; it goes with the launch. None where the rank is the launcher.
        heart: told what this rank does, where its launcher looks.
    """

    rank: int
    size: int
    device: Device
    stop: Stop = field(default_factory=Stop)
    folder: Path | None = None
    heart: Beats = field(default_factory=Unwatched)


Worker = Callable[Concatenate[World, P], T]


def launch(world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``launch_on`` the GPUs of this host where it has any, else on its CPU."""
    return launch_on(None, world, worker, *args, **kwargs)


def launch_on(wanted: DeviceKind | None, world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``worker(World, ...)`` on every rank, each a process of its own; a single rank on the CPU runs right here.

    This process touches no GPU: what it took of one, no rank would have.

    Returns:
        What rank 0 returned.

    Raises:
        UserError, Fault: the first cause, as the rank that met it said. No rank is left.
        SystemExit: SIGTERM came, and the ranks do not listen to it or did not yet; or it came twice.
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
    """``launch_on`` a kind of device, a single rank too in a process of its own. Any thread may call it."""
    return launch_from(0, kind, world, worker, *args, **kwargs)


def launch_from(first: int, kind: DeviceKind, world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``launch_apart`` beside other ranks of this host, which have the GPUs before ``first``."""
    value: T = launch_parties(kind, [RankWorld(size=world, worker=worker, args=args, kwargs=kwargs)], first)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWorld:
    """Ranks that are a world of their own, launched beside those of others.

    Attributes:
        size: how many are launched here.
        worker: what each of them does.
        args, kwargs: what it is given beside its ``World``.
        name: what a fault of theirs begins with.
        meeting: where more ranks of their world are met, which other hosts launch.
    """

    size: int
    worker: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    meeting: Meeting | None = None

    def seat(self, number: int, file: Path) -> RankSlot:
        """Where one that is launched here, by its number among these, meets the others."""
        if self.meeting is None:
            return RankSlot(number, self.size, f"file://{file}", None, is_first=number == 0)
        meeting = self.meeting
        return RankSlot(meeting.first + number, meeting.world, "", meeting.store, is_first=number == 0)


def launch_parties(kind: DeviceKind, parties: Sequence[RankWorld], first: int = 0) -> Any:  # noqa: ANN401
    """Launch several worlds at once; they end together, with the first trouble of any of them.

    Args:
        kind: of device. Each rank has its own GPU, in the order of the parties.
        parties: the first one's rank 0 may hold a terminal.
        first: GPUs before it belong to others.

    Returns:
        What rank 0 of the first party returned. Raises as ``launch_on``.
    """
    with (
        temporary_folder("superstep-launch-") as folder,
        _ranks(parties, kind, folder, first) as ranks,
    ):
        stop = Stop()
        with listening(stop, lambda: pass_on(ranks)):
            value, trouble = _collect(ranks)
            if trouble is None:
                return value
            if stop.is_asked and trouble.order == 1:
                raise SystemExit(STOPPED)
            raise trouble.error


def launch_here(
    kind: DeviceKind, party: RankWorld, cut: Connection, troubled: Callable[[Trouble], None]
) -> tuple[Any, bool]:
    """Launch the ranks of this host, of a party that meets others.

    Args:
        kind: of device.
        party: has a meeting.
        cut: ends the ranks as soon as something can be read from it.
        troubled: told why ranks have to be ended, if that is known here, before they are.

    Returns:
        What the first of them returned; and whether all ranks of this host have come to their end.
    """
    with (
        temporary_folder("superstep-launch-") as folder,
        _ranks([party], kind, folder) as ranks,
    ):
        stop = Stop()
        with listening(stop, lambda: pass_on(ranks)):
            value, trouble = _collect(ranks, cut)
            if trouble is not None:
                if stop.is_asked and trouble.order == 1:
                    raise SystemExit(STOPPED)
                troubled(trouble)
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
    """The process of a rank: of its party, and the ``nth`` of all."""
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
        lost = Lost(f"the process cannot be started: {error}.", rank=seat.rank)
        lost.at_s = time.time()
        raise lost from error
    theirs.close()
    host = os.uname().nodename if party.meeting is None else party.meeting.host
    handle = ProcessHandle(process)
    return RankProcess(party.name, seat.rank, host, nth == 0, handle, ours, place.stderr, heart)


def _collect(ranks: Sequence[RankProcess], cut: Connection | None = None) -> tuple[Any, Trouble | None]:
    """Wait for every report: what rank 0 returned, and the first cause why one did not. When something can be read from
    ``cut``, only what is just being said is waited for.
    """
    waiting = {rank.pipe: rank for rank in ranks}
    troubles: list[Trouble] = []
    deadline_s = float("inf")
    attending = Attending(is_whole=cut is None)  # ranks that are cut off are so with those of other hosts
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
            if isinstance(report, Trouble):
                troubles.append(rank.named(report))
                grace_s = LOST_GRACE_S if isinstance(report.error, Lost) else GRACE_S
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
            elif rank.is_first:
                (value,) = report
    if troubles:
        first = min(troubles, key=lambda trouble: (trouble.order, trouble.at_s))
        if isinstance(first.error, Fault):
            first.error.said = output_of(ranks, first.error)
        return value, first
    if waiting:
        return value, None
    # A rank that has reported ends by itself: its groups are given back in an order that all keep.
    for rank in ranks:
        rank.process.join(END_S)
    return value, None


def _serve(pipe: Connection, place: LauncherState, seat: RankSlot, kind: DeviceKind, folder: Path, number: int) -> None:
    """What a rank's process does: one call, one report. ``number`` says which GPU of the host is its own."""
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
            seat.take(device)
            if seat.rank == 0:
                signal.signal(END, _leave)
            heart = Unwatched() if place.heart is None else answering(Heart(place.heart, marks=device.stream_marks()))
            value = worker(World(seat.rank, seat.world, device, folder=folder, heart=heart), *args, **kwargs)
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
    """Ctrl-C and the like wait for the end of the block: a rank that has no name yet could not be ended."""
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

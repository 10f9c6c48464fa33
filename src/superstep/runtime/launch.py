"""Launching ranks as processes of this one on this host; ``runtime.join`` joins those of torchrun.

    launcher ──► seed ──forks──► rank 0, rank 1, ...    each reports once: its value, or why it has none
        │ first trouble
        ├── waits GRACE_S for the other reports: the first cause is among them, the rest follows from it
        └── ends the ranks that are left: rank 0, which may hold a terminal, gently at first

SIGTERM is passed on to the ranks, who may stop in their own time; a second one ends them.

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
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from superstep.errors import Fault, SuperstepError, UserError
from superstep.plan.config import DeviceKind
from superstep.runtime.device import Device, choose, pick
from superstep.runtime.seed import Place, context_of, place_at, stderr_away
from superstep.runtime.stop import STOPPED, Stop, listening

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)

GRACE_S = 1.0
"""Once a rank has failed, how long the others have to report too: they notice within milliseconds, or never."""

END_S = 3.0
"""How long a rank may take to end when it is told to."""

END = signal.SIGUSR2
"""Tells a rank to end now; SIGTERM may ask it to come to an end of its own."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class World:
    """The launched ranks, seen from one of them."""

    rank: int
    size: int
    device: Device
    stop: Stop = field(default_factory=Stop)


Worker = Callable[Concatenate[World, P], T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why a rank did not return.

    Attributes:
        at_s: when, in seconds of the host's clock.
        order: 0 where the rank said why itself, 1 where it was killed, 2 where something unforeseen was raised, 3
            where that came over a connection: as a rule, because the rank at the other end had failed before.
        error: what the launcher shall raise.
    """

    at_s: float
    order: int
    error: SuperstepError


def launch(world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``launch_on`` the GPUs of this host where it has any, else on its CPU."""
    return launch_on(None, world, worker, *args, **kwargs)


def launch_on(asked: DeviceKind | None, world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``worker(World, ...)`` on every rank, each a process of its own; a single rank on the CPU runs right here.

    This process touches no GPU: what it took of one, no rank would have.

    Returns:
        What rank 0 returned.

    Raises:
        UserError, Fault: the first cause, as the rank that met it said. No rank is left.
        SystemExit: SIGTERM came, and the ranks do not listen to it or did not yet; or it came twice.
    """
    kind = choose(asked, world)
    if world == 1 and kind == "cpu":
        store = dist.HashStore()  # type: ignore[attr-defined]
        device = pick(0, kind)
        dist.init_process_group(device.backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
        try:
            return worker(World(0, 1, device), *args, **kwargs)
        finally:
            dist.destroy_process_group()
    return launch_apart(kind, world, worker, *args, **kwargs)


def launch_apart(kind: DeviceKind, world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``launch_on`` a kind of device, a single rank too in a process of its own. Any thread may call it."""
    return launch_from(0, kind, world, worker, *args, **kwargs)


def launch_from(first: int, kind: DeviceKind, world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``launch_apart`` beside other ranks of this host, which have the GPUs before ``first``."""
    call = pickle.dumps((worker, args, kwargs))
    with (
        tempfile.TemporaryDirectory(prefix="superstep-launch-") as folder,
        _ranks(worker, world, kind, Path(folder), call, first) as ranks,
    ):
        stop = Stop()
        with listening(stop, lambda: _pass_on(ranks)):
            value: T = _collect(ranks, stop)
        return value


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's process, as the launcher sees it."""

    number: int
    process: BaseProcess
    pipe: Connection
    stderr: Path

    def death(self) -> Trouble:
        """Why it ended without a report."""
        self.process.join(END_S)
        code = self.process.exitcode or 0
        if code < 0:
            why = f"the process was killed by {signal.Signals(-code).name}"
            why += ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
        else:
            why = f"the process ended with exit status {code} before it could say why"
        if code > 0 and not self.stderr.exists():
            why += "; a script that launches ranks does so below if __name__ == '__main__'."
            return Trouble(at_s=time.time(), order=1, error=Fault(why, rank=self.number))
        said = self.stderr.read_text(encoding="utf-8", errors="replace").split("\n") if self.stderr.exists() else []
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        hint = f"; its last line was: {last}" if last and code != -signal.SIGKILL else "."
        return Trouble(at_s=time.time(), order=1, error=Fault(f"{why}{hint}", rank=self.number))


@contextlib.contextmanager
def _ranks(
    worker: Callable[..., Any], world: int, kind: DeviceKind, folder: Path, call: bytes, first: int
) -> Iterator[list[_Rank]]:
    """The processes of ``world`` ranks; none is left when the block ends."""
    context = context_of(worker)
    ranks: list[_Rank] = []
    try:
        with _signals_deferred():
            for number in range(world):
                ranks.append(_start(context, number, world, kind, folder, first))  # noqa: PERF401 - known even if a later one fails
        for rank in ranks:
            with contextlib.suppress(OSError):  # one that has died already is found out by its silence
                rank.pipe.send_bytes(call)
        yield ranks
    finally:
        with _signals_deferred():
            _end(ranks)


def _start(context: BaseContext, number: int, world: int, kind: DeviceKind, folder: Path, first: int) -> _Rank:
    ours, theirs = context.Pipe()
    place = place_at(folder / f"stderr-{number}")
    process = context.Process(  # type: ignore[attr-defined]
        target=_serve, args=(theirs, place, number, world, kind, folder / "store", first), name=f"rank {number}"
    )
    try:
        with stderr_away():
            process.start()
    except (OSError, EOFError) as error:
        raise Fault(f"the process cannot be started: {error}.", rank=number) from error
    theirs.close()
    return _Rank(number, process, ours, place.stderr)


def _end(ranks: Sequence[_Rank]) -> None:
    """End what still runs: rank 0 gently, then not."""
    deadline_s = time.monotonic() + END_S
    for rank in ranks:
        if rank.number == 0 and rank.process.is_alive() and rank.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, END)
        else:
            rank.process.kill()
    for rank in ranks:
        rank.process.join(max(0.0, deadline_s - time.monotonic()))
        rank.process.kill()
        rank.process.join()
        rank.pipe.close()


def _pass_on(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.process.terminate()


def _collect(ranks: Sequence[_Rank], stop: Stop) -> Any:  # noqa: ANN401
    """Wait for every report; what rank 0 returned, or else the first cause is raised."""
    waiting = {rank.pipe: rank for rank in ranks}
    troubles: list[Trouble] = []
    deadline_s = float("inf")
    value = None
    while waiting and time.monotonic() < deadline_s:
        timeout_s = None if deadline_s == float("inf") else deadline_s - time.monotonic()
        for pipe in wait(list(waiting), timeout_s):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                report = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                report = rank.death()
            if isinstance(report, Trouble):
                troubles.append(report)
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
            elif rank.number == 0:
                (value,) = report
    if troubles:
        first = min(troubles, key=lambda trouble: (trouble.order, trouble.at_s))
        if stop.is_asked and first.order == 1:
            raise SystemExit(STOPPED)
        raise first.error
    # A rank that has reported ends by itself: its groups are given back in an order that all keep.
    for rank in ranks:
        rank.process.join(END_S)
    return value


def _serve(pipe: Connection, place: Place, rank: int, world: int, kind: DeviceKind, store: Path, first: int) -> None:
    """What a rank's process does: one call, one report."""
    place.take()
    # Ctrl-C reaches every process of the terminal; the launcher alone acts on it, and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_launcher, args=((store.parent, place.sockets),), daemon=True).start()
    # Cores are shared out by running one rank on each; more threads would only fight over them.
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # a launcher that has gone wants no report
        try:
            worker, args, kwargs = pickle.loads(pipe.recv_bytes())
            device = pick(first + rank, kind)
            dist.init_process_group(
                device.backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT
            )
            if rank == 0:
                signal.signal(END, _leave)
            value = worker(World(rank, world, device), *args, **kwargs)
            dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001 - whatever ended the rank must reach the launcher
            # Reported before this process ends, and with it the connections that others will miss.
            pipe.send_bytes(pickle.dumps(_trouble(rank, error)))
        else:
            pipe.send_bytes(pickle.dumps((value if rank == 0 else None,)))


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


def _trouble(rank: int, error: BaseException) -> Trouble:
    known: SuperstepError
    order = 3 if is_echo(error) else 2
    match error:
        case UserError():
            known, order = UserError(str(error)), 0
        case Fault():
            known = error if error.rank >= 0 else error.on(rank)
            order = order if isinstance(error.__cause__, RuntimeError) else 0
        case SystemExit():
            known, order = Fault("the process was told to end.", rank=rank), 1
        case OSError():
            known = Fault(f"{type(error).__name__}: {error}.", rank=rank)
        case _:
            text = "".join(traceback.format_exception(error)).rstrip()
            known = Fault(f"{type(error).__name__}: {error}\n{text}", rank=rank)
    return Trouble(at_s=time.time(), order=order, error=known)


def is_echo(error: BaseException) -> bool:
    """Whether it came over a connection between ranks."""
    cause = error.__cause__ or error
    return isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and "gloo" in str(cause))


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


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. For small things."""
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        return [value]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value)
    return found

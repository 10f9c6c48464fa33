"""The fork server: a process that has imported torch and does nothing else, of which every rank is a fork.

    launcher ──forks, or spawns──► seed ──forks──► rank 0, rank 1, ...

Torch is so imported once for all ranks, of this launch and of those that follow, and they share its memory. Forks of a
process that has computed, or has touched a GPU, would not be sound; the seed has done neither. A command that knows
early that it will launch ranks has done neither either: it imports torch for itself and the seed, which is then a fork
of it (``begin``). Where forks are not sound at all (macOS), and where the name of the temporary folder leaves no room
for that of a socket, each rank is spawned by itself and imports torch for itself.

The seed may be older than a launch: what a rank has of its launcher, its environment say, is handed to it. It ends with
its launcher.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import reduction, resource_tracker, util
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, NoReturn

from superstep.errors import Fault
from superstep.launch.temporary_folders import OWNER, own

IGNORED = (signal.SIGTERM, signal.SIGHUP)
"""What the seed does not heed, as a whole job may be sent it. Ctrl-C it ignores by itself."""

IMPORTED = ("torch", "torch.distributed", "torch._dynamo")
"""What the seed imports, beside what the first worker's module does. Of the last torch makes use as soon as a tensor
without memory is filled, or a gradient is asked for: a second of imports, in which each rank would stand.
"""

LAST = "superstep.launch.freeze_gc"
"""What it imports after all else."""

SEEDS = 2
"""How many are begun for one launch: one may be killed while it is asked."""

_ONE_STDERR = threading.Lock()
"""Of two threads that put it away at once, one would put back what the other had put in its place: nothing."""

LONGEST = 107 - len("/pymp-12345678/listener-12345678")
"""Bytes of the temporary folder's name, below which the seed's socket lies: Linux takes 107 for all of it."""


def context_of(worker: Callable[..., Any]) -> BaseContext:
    """What starts ranks, once it can: the wait for the seed's imports may be interrupted here, and has no name to end.

    Raises:
        Fault: the seed has died over them, and another one has as well.
    """
    if not _has_seed():
        return multiprocessing.get_context("spawn")
    for _ in range(SEEDS):
        context = fork_context([worker.__module__])
        first = context.Process(target=_nothing)
        try:
            first.start()
        except (OSError, EOFError) as error:
            died: Exception = error
            continue
        first.join()
        return context
    raise Fault("the process that ranks are forked from has died.", rank=0) from died


def begin(module: str, *, is_unused: bool = False) -> None:
    """Begin the seed of ranks whose worker is in ``module``: as a fork of this process, where that has not imported
    torch yet and so has not computed. Both have it then, and one has imported it.

    Args:
        module: the worker's.
        is_unused: whether torch has computed nothing here, though it is imported.
    """
    if not _has_seed():
        return
    if ("torch" in sys.modules and not is_unused) or threading.active_count() > 1:
        fork_context([module])
        return
    for name in _imports([module]):
        importlib.import_module(name)
    with _forking():
        fork_context([module])


def _has_seed() -> bool:
    return sys.platform == "linux" and len(os.fsencode(tempfile.gettempdir())) <= LONGEST


def fork_context(modules: Sequence[str]) -> ForkServerContext:
    """What starts forks of this process's seed. Where there is none yet it is begun, and imports these as well.

    A fork that is to heed what the seed does not must ``heed_all``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_imports(modules))
    resource_tracker.ensure_running()  # its start would unmask SIGTERM
    sockets = Path(util.get_temp_dir())
    if not (sockets / OWNER).exists():
        own(sockets)  # for as long as this process lives
    with stderr_away(), _mask_signals(IGNORED):
        ensure_running()
    return context


def _imports(modules: Sequence[str]) -> list[str]:
    """What a seed imports, in order."""
    return [name for name in (*IMPORTED, *modules, LAST) if name != "__main__"]


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Within the block what ``multiprocessing`` spawns, to run a line of Python, is a fork that runs it."""
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def _fork(executable: str, arguments: Sequence[str], files: Sequence[int]) -> int:
    """The number of a fork that runs the last of the ``arguments`` as Python would, with no files but these."""
    # What waits in a buffer here would be written again by every fork of the fork.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # An interruption of the fork would run what the command does at its end a second time.
    with _mask_signals((signal.SIGINT,)):
        process = os.fork()
        if process == 0:
            _become(arguments[-1], files)
    return process


def _become(line: str, files: Sequence[int]) -> NoReturn:
    """What a fork does from here on."""
    status = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        low = 3  # the standard streams stay
        for file in (*sorted(files), os.sysconf("SC_OPEN_MAX")):
            os.closerange(low, file)
            low = file + 1
        exec(line, {})
        status = 0
    except SystemExit:
        status = 0
    finally:
        os._exit(status)


def heed_all() -> None:
    """Heed again what the seed does not."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


def _nothing() -> None:
    """What the first fork does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherState:
    """What a rank has of its launcher as it is now. The seed may be older than that.

    Attributes:
        environment: all of it.
        stdout: a descriptor.
        stderr: a file to be made.
        sockets: the folder of the seed's socket, which the launcher removes at its end, if it comes to one.
        heart: a descriptor of the page where the rank tells what it does, if there is one.
        heeds_signals: whether SIGTERM and SIGHUP, which a whole process group may be sent, are the rank's own to act
            on; else they are left to the launcher.
    """

    environment: dict[str, str]
    stdout: int
    stderr: Path
    sockets: Path
    heart: int | None = None
    heeds_signals: bool = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Descriptors are handed on where a process is started, and no numbers of them."""
        heart = None if self.heart is None else reduction.DupFd(self.heart)
        stdout = reduction.DupFd(self.stdout)
        return _receive_state, (self.environment, stdout, self.stderr, self.sockets, heart, self.heeds_signals)

    def take(self) -> None:
        """Make it this process's own."""
        os.dup2(self.stdout, 1)
        os.close(self.stdout)
        stderr = os.open(self.stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(stderr, 2)
        os.close(stderr)
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
        os.environ.clear()  # noqa: TID251
        os.environ.update(self.environment)  # noqa: TID251
        if not self.heeds_signals:
            for number in IGNORED:  # the seed has blocked them: none gets through before
                signal.signal(number, signal.SIG_IGN)
        heed_all()


def _receive_state(
    environment: dict[str, str],
    stdout: Any,  # noqa: ANN401 - its type has no public name
    stderr: Path,
    sockets: Path,
    heart: Any,  # noqa: ANN401 - as stdout's
    heeds_signals: bool,
) -> LauncherState:
    return LauncherState(
        environment=environment,
        stdout=stdout.detach(),
        stderr=stderr,
        sockets=sockets,
        heart=None if heart is None else heart.detach(),
        heeds_signals=heeds_signals,
    )


def place_at(stderr: Path, heart: int | None = None, *, heeds_signals: bool = True) -> LauncherState:
    """What this process has now; what the rank writes to stderr goes to a file."""
    return LauncherState(
        environment=dict(os.environ),  # noqa: TID251 - a rank's is its launcher's, as any child's
        stdout=1,
        stderr=stderr,
        sockets=Path(util.get_temp_dir()),
        heart=heart,
        heeds_signals=heeds_signals,
    )


@contextlib.contextmanager
def stderr_away() -> Iterator[None]:
    """What a process that starts within the block writes to stderr, before it has one of its own, goes nowhere."""
    with _ONE_STDERR:
        kept = os.dup(2)
        try:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextlib.contextmanager
def _mask_signals(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """A process that starts within the block never sees these, unless it asks for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

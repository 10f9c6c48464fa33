"""The fork server: a process that has imported torch and nothing else; every rank is a fork of it.

    launcher ──forks, or spawns──► seed ──forks──► rank 0, rank 1, ...

So torch is imported once for all ranks of all launches, and they share its memory. Forks are not safe after a process
has computed or touched a GPU; the seed has done neither. A command that will launch ranks imports torch for itself and
the seed, which is then its fork (``begin``). Where forks are not safe at all (macOS), and where the path of the
temporary folder is too long for a socket, each rank is spawned and imports torch by itself.

The seed may be older than a launch, so each rank receives its launcher's environment. The seed ends with its launcher.
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
"""Signals that the seed ignores, as they may be sent to a whole job. It ignores Ctrl-C anyway."""

IMPORTED = ("torch", "torch.distributed", "torch._dynamo")
"""Imports of the seed, besides the first worker's module. Torch imports ``_dynamo`` as soon as a tensor without memory
is filled, or a gradient is computed: a second for each rank.
"""

LAST = "superstep.launch.freeze_gc"
"""Imported last."""

SEEDS = 2
"""How many seeds are tried for one launch: one may be killed during its imports."""

_ONE_STDERR = threading.Lock()
"""Only one thread at a time may redirect stderr: a second one would restore the redirected one."""

LONGEST = 107 - len("/pymp-12345678/listener-12345678")
"""The longest path of the temporary folder, in bytes: Linux allows 107 for the socket below it."""


def context_of(worker: Callable[..., Any]) -> BaseContext:
    """The context that starts ranks. The wait for the seed's imports happens here, where it may be interrupted. Raises
    Fault where two seeds died during their imports.
    """
    if not supports_fork_server():
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
    """Start the seed for a worker, as a fork of this process if it has not computed. Both then have the module's
    imports.

    Args:
        module: the worker's.
        is_unused: whether torch has computed nothing in this process, though it is imported.
    """
    if not supports_fork_server():
        return
    if ("torch" in sys.modules and not is_unused) or threading.active_count() > 1:
        fork_context([module])
        return
    for name in _imports([module]):
        importlib.import_module(name)
    with _forking():
        fork_context([module])


def supports_fork_server() -> bool:
    """Whether this system has one: its socket's path in the temporary folder must be short."""
    return sys.platform == "linux" and len(os.fsencode(tempfile.gettempdir())) <= LONGEST


def fork_context(modules: Sequence[str]) -> ForkServerContext:
    """The context of this process's seed; starts the seed, with these modules, where there is none.

    A fork that should receive the signals that the seed ignores must call ``heed_all``.
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
    return [name for name in (*IMPORTED, *modules, LAST) if name != "__main__"]


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Within the block, ``multiprocessing`` forks instead of spawning Python to run a line."""
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def _fork(executable: str, arguments: Sequence[str], files: Sequence[int]) -> int:
    """Fork a process that runs the last argument as Python would, with only these files open; returns its id."""
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
    """Receive the signals that the seed ignores."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


def _nothing() -> None:
    """Do nothing, in the first fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherState:
    """The launcher's current state for a rank, as the seed may be older.

    Attributes:
        stdout: a descriptor.
        stderr: a file to create.
        sockets: the folder of the seed's socket; the launcher removes it at its normal end.
        heart: a descriptor of the rank's status page, if it has one.
        heeds_signals: whether the rank handles SIGTERM and SIGHUP itself; else only the launcher does.
    """

    environment: dict[str, str]
    stdout: int
    stderr: Path
    sockets: Path
    heart: int | None = None
    heeds_signals: bool = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle descriptors by passing them on, since their numbers mean nothing in another process."""
        heart = None if self.heart is None else reduction.DupFd(self.heart)
        stdout = reduction.DupFd(self.stdout)
        return _receive_state, (self.environment, stdout, self.stderr, self.sockets, heart, self.heeds_signals)

    def take(self) -> None:
        """Apply the state to this process."""
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
    """This process's current state, with a file for the rank's stderr."""
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
    """Within the block, a process that starts writes its early stderr to nowhere."""
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
    """Within the block, a process that starts has these signals blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

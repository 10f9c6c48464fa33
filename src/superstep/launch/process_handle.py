"""ProcessHandle: a process that another process forked for us, held by a pidfd.

    launcher ── fork server ── rank         only the fork server learns how a rank ends; it reports to the launcher

Where the fork server has died, ``multiprocessing`` takes all of its processes for ended with status 255: it sends no
signals and waits for none. A pidfd stays the same process, whoever its parent is, even if its id is reused.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from multiprocessing.process import _children as process_children  # type: ignore[attr-defined]
from pathlib import Path

from superstep.monitor.procfs import is_held, stat_in

HELD_S = 2.0
"""How long the system must hold a killed process without a break: memory given back may take it longer, but is work."""

LOOK_S = 0.25

UNKNOWN_STATUS = 255
"""The exit status that ``multiprocessing`` gives a process whose fork server is gone."""


class ProcessHandle:
    """One process, from its start on. ``process``: has just been started."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None, "the process has been started"
        self.pid = process.pid
        self._process = process
        self._parent = _parent_of(self.pid)
        self._file = _open(self.pid)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive() if self._file is None else not self._ends_within(0.0)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, at most ``timeout_s``."""
        if self._file is not None:
            self._ends_within(timeout_s)
        self._process.join(timeout_s)  # its parent is told a moment later, and tells

    def kill(self) -> bool:
        """Kill it and wait for its end; False where the system has held it for HELD_S, and ends it some time later.

        Such a process is forgotten: Python would wait for it at its own end.
        """
        self.send(signal.SIGKILL)
        held_s = 0.0
        while held_s < HELD_S:
            before_s = time.monotonic()
            self.join(LOOK_S)
            if not self.is_alive:
                return True
            held_s = held_s + time.monotonic() - before_s if is_held(self.pid) else 0.0
        process_children.discard(self._process)
        return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal; does nothing where the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._file is None:
                os.kill(self.pid, number)
            elif sys.platform == "linux":
                signal.pidfd_send_signal(self._file, number)

    def exit_status(self) -> int | None:
        """The exit status, negative for a signal; None where the fork server that knew it is gone."""
        code = self._process.exitcode
        is_known = code != UNKNOWN_STATUS or self._parent is None or _runs(self._parent)
        return (code or 0) if is_known else None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _ends_within(self, timeout_s: float | None) -> bool:
        assert self._file is not None
        poll = select.poll()
        poll.register(self._file, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def _open(pid: int) -> int | None:
    """A pidfd; None where the system has none, or the process has ended."""
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _parent_of(pid: int) -> int | None:
    try:
        return int(stat_in(Path(f"/proc/{pid}"))[1])
    except (OSError, IndexError, ValueError):
        return None


def _runs(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return stat_in(Path(f"/proc/{pid}"))[0] not in (b"Z", b"X")
    except OSError:
        return False

"""Runs a command with limits of time, memory and output, and ends it with all processes that it started."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from superstep.grade.sandbox.cgroup import Cgroup
from superstep.grade.sandbox.memory import count_boxed_bytes, resident_bytes
from superstep.grade.sandbox.orphans import children, end_each
from superstep.monitor.deadline import ActiveDeadline
from superstep.monitor.stopped_process import ProcessWatch, is_stopped

Limit = Literal["timeout", "memory", "output"]

LOOK_S = 0.025
"""Seconds between looks at its memory. Two cores fill about 100 MiB in that time."""

GONE_S = 10.0
"""Seconds for the kernel to end all processes: milliseconds as a rule, more where much memory is freed."""

LEFT_S = 0.002
"""Seconds between looks at killed processes."""

STDERR_BYTES = 4096
"""The bytes of stderr that are kept."""

PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of a command; see ``GradeConfig``.

    Attributes:
        group: counts the memory in the kernel; without it memory is polled every LOOK_S.
        adopts: this process does nothing but run such commands, and adopts the processes that they leave.
    """

    seconds: float
    memory_bytes: int
    output_bytes: int
    group: Cgroup | None = None
    adopts: bool = False


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended.

    Attributes:
        status: the exit status; negative for a signal.
        limit: the limit that it exceeded, if any.
        stdout: all of it, or what came before the limit.
        stderr: its beginning.
    """

    status: int
    limit: Limit | None
    stdout: bytes
    stderr: bytes


class StillThereError(Exception):
    """A killed process still exists."""


class StoppedError(Exception):
    """A process was stopped by a signal from outside."""


def run_bounded(
    argv: Sequence[str],
    given: bytes,
    bounds: ProcessLimits,
    *,
    uid: int | None = None,
    fds: Sequence[int] = (),
    folder: Path | None = None,
    inside: str | None = None,
) -> CommandResult:
    """Run a command to its end, in its own session and with an empty environment.

    Args:
        given: standard input.
        uid: user and group to run as, where they differ from ours.
        fds: open files that the command inherits.
        folder: the working folder.
        inside: where the command makes a sandbox, the folder in memory that is mounted in it. Programs inside cannot
        signal the command's own process, so a stop of that process came from outside. Without a sandbox a program may
        stop itself, and its time runs on.

    Raises:
        StoppedError: the command's own process was stopped.
        StillThereError: it was killed and still exists.
        OSError: it cannot be started.
    """
    others = children() if bounds.adopts else None
    child = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        user=uid,
        group=uid,
        extra_groups=None if uid is None else [],
        pass_fds=fds,
        cwd=folder,
        env={},
        start_new_session=True,
        preexec_fn=None if bounds.group is None else bounds.group.join,
    )
    watched = _Watched(child, given, bounds, inside, others)
    limit: Limit | None = None
    try:
        limit = watched.follow()
    finally:
        watched.end()
    return CommandResult(child.returncode, limit, bytes(watched.stdout), bytes(watched.stderr[:STDERR_BYTES]))


class _Watched:
    """A process and its pipes, watched until they end."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        given: bytes,
        bounds: ProcessLimits,
        inside: str | None,
        others: set[int] | None,
    ) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self._child, self._bounds = child, bounds
        self._given = memoryview(given)
        self._deadline = ActiveDeadline(bounds.seconds)
        self._pulse = ProcessWatch()
        self._inside = inside
        self._others = others
        self._looked_at = [] if inside is None else [child.pid]
        self._kills = 0 if bounds.group is None else bounds.group.kills()
        self._select = selectors.DefaultSelector()
        for pipe, events, into in (
            (child.stdin, selectors.EVENT_WRITE, None),
            (child.stdout, selectors.EVENT_READ, self.stdout),
            (child.stderr, selectors.EVENT_READ, self.stderr),
        ):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._select.register(pipe, events, into)

    def follow(self) -> Limit | None:
        """Wait until the process ends or exceeds a limit; returns that limit."""
        looked = 0.0
        while not self._has_ended():
            self._move(LOOK_S)
            now = time.monotonic()
            if self._deadline.left() <= 0:
                self._require_going(any(map(is_stopped, self._looked_at)))
                return "timeout"
            if max(len(self.stdout), len(self.stderr)) > self._bounds.output_bytes:
                return "output"
            if now - looked >= LOOK_S:
                looked = now
                self._require_going(self._pulse.look(self._looked_at) is not None)
                if self._is_too_large():
                    return "memory"
        return "memory" if self._was_killed_for_memory() else None

    def _is_too_large(self) -> bool:
        pid = self._child.pid
        taken_bytes = resident_bytes(pid) if self._inside is None else count_boxed_bytes(pid, self._inside)
        return taken_bytes > self._bounds.memory_bytes or self._was_killed_for_memory()

    def _was_killed_for_memory(self) -> bool:
        """Whether the kernel killed some of its processes; the others may not notice."""
        group = self._bounds.group
        return group is not None and group.kills() > self._kills

    def _require_going(self, has_stopped: bool) -> None:
        if has_stopped:
            raise StoppedError(f"process {self._child.pid} was stopped (SIGSTOP) and did not go on")

    def end(self) -> None:
        """End what is left, writers to its pipes first, read the rest of the output, and wait until all is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)  # not yet waited for, so that the number is still its own
        deadline = ActiveDeadline(GONE_S)
        try:
            while (self._reading() or not self._has_ended()) and deadline.left() > 0:
                self._move(LOOK_S)
            is_gone = not self._reading() and self._has_ended()
            if is_gone:
                self._child.wait()
                while (left := self._list_left()) and deadline.left() > 0:
                    time.sleep(LEFT_S)
                is_gone = not left
        finally:
            self._select.close()
            for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        if not is_gone:
            raise StillThereError(f"process {self._child.pid} was killed and is still there after {GONE_S:g} s")

    def _list_left(self) -> set[int]:
        """Killed processes that still exist, without our pipes: their memory would count for the next program."""
        left = set() if self._bounds.group is None else self._bounds.group.kill()
        return left if self._others is None else left | end_each(children() - self._others)

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _reading(self) -> bool:
        return any(key.data is not None for key in self._select.get_map().values())

    def _move(self, seconds: float) -> None:
        """Move bytes through the pipes, or wait."""
        if not self._select.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._select.select(seconds):
            self._through(key.fileobj, key.data)

    def _through(self, pipe: Any, into: bytearray | None) -> None:  # noqa: ANN401 - as selectors give it
        try:
            if into is None:
                self._given = self._given[os.write(pipe.fileno(), self._given[:PIECE_BYTES]) :]
                is_over = not self._given
            else:
                piece = os.read(pipe.fileno(), PIECE_BYTES)
                if len(into) <= self._bounds.output_bytes:  # what is over the bound is read, and not kept
                    into += piece
                is_over = not piece
        except BlockingIOError:
            return
        except BrokenPipeError:
            is_over = True
        if is_over:
            self._select.unregister(pipe)
            if into is None:
                _close(pipe)


def _close(pipe: IO[bytes]) -> None:
    with suppress(BrokenPipeError):
        pipe.close()

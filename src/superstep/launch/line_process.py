"""LineProcess: a process that answers lines of JSON with lines of JSON, each before a deadline.

The caller waits for a busy process, but gives up at once on one that a signal has stopped. Each question has a random
number, and only an answer with that number counts: not what a library or an untrusted program in the process prints.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from superstep.monitor.deadline import ActiveDeadline
from superstep.monitor.stopped_process import ProcessWatch, is_stopped

PIECE_BYTES = 1 << 16

GONE_S = 10.0
"""Seconds for the kernel to end a killed process. One that hangs in the kernel, on a disk say, is left to it."""

NUMBER = "number"
"""The key of a question's number, in question and answer."""


class LineProcess:
    """A process that answers questions, and is killed where it is late. One thread at a time may ask."""

    def __init__(self, command: Sequence[str], *, is_heard: bool) -> None:
        """Start the process. ``is_heard``: whether its stderr goes to ours."""
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if is_heard else subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C on the terminal is the pool's to handle
        )
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        self._deadline: ActiveDeadline | None = None
        self._pulse = ProcessWatch()
        self._killing = threading.Lock()
        self._killed_s: float | None = None
        self.was_stopped = False
        """Whether the last question was given up because a signal had stopped the process."""
        self.has_ended = False
        """Whether the last question was given up because the process had closed its pipes, as at its end."""

    @property
    def was_late(self) -> bool:
        """Whether the last question exceeded its deadline."""
        return self._deadline is not None and self._deadline.is_over

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_there(self) -> bool:
        """Whether it runs. An ended process is not reaped here: its id stays its own until ``end``."""
        if self._child.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer; None without one in time. Then the process is of no more use: call ``end``."""
        self._deadline = deadline = ActiveDeadline(seconds)
        self._pulse, self.was_stopped, self.has_ended = ProcessWatch(), False, False
        number = secrets.token_hex(8)
        if not self._write(json.dumps(question | {NUMBER: number}).encode() + b"\n", deadline):
            return None
        line = self._read(deadline)
        try:
            answer = None if line is None else json.loads(line)
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) and answer.pop(NUMBER, None) == number else None

    def kill(self) -> None:
        """Kill it and the processes of its session, from any thread.

        A thread in ``ask`` returns at once, even if others hold the pipes open.
        """
        with self._killing:
            if self._killed_s is None:
                self._killed_s = time.monotonic()
                with suppress(ProcessLookupError, PermissionError):  # the latter of a process that has ended, on a Mac
                    os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and wait for its end, at most GONE_S since the first kill."""
        self.kill()
        assert self._killed_s is not None
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, self._killed_s + GONE_S - time.monotonic()))
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _ready(self, deadline: ActiveDeadline, *, reads: Sequence[int] = (), writes: Sequence[int] = ()) -> bool:
        """Wait for a pipe; False where the question is given up. The process is watched only while the caller waits."""
        while self._killed_s is None and (wait := deadline.step()):
            if any(select.select(reads, writes, (), wait)):
                return True
            if self._pulse.look([self.pid]) is not None:
                break
        # At the end of its time, however little that was, a stopped one is no late one.
        self.was_stopped = is_stopped(self.pid)
        return False

    def _write(self, data: bytes, deadline: ActiveDeadline) -> bool:
        assert self._child.stdin is not None
        fd, left = self._child.stdin.fileno(), memoryview(data)
        while left:
            if not self._ready(deadline, writes=[fd]):
                return False
            try:
                left = left[os.write(fd, left[:PIECE_BYTES]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self.has_ended = True
                return False
        return True

    def _read(self, deadline: ActiveDeadline) -> bytes | None:
        assert self._child.stdout is not None
        fd, line = self._child.stdout.fileno(), bytearray()
        while not line.endswith(b"\n"):
            if not self._ready(deadline, reads=[fd]):
                return None
            piece = os.read(fd, PIECE_BYTES)
            if not piece:
                self.has_ended = True
                return None
            line += piece
        return bytes(line)


def explain_no_answer(process: LineProcess, seconds: float) -> str:
    """Why a process did not answer within its ``seconds``."""
    if process.was_stopped:
        return f"its process {process.pid} was stopped (SIGSTOP) and did not go on: killed"
    return f"no answer within {seconds:g} s: killed" if process.was_late else "its process ended"

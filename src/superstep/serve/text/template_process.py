"""The process that renders chat templates, as the server sees it: a text, or one line that says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from superstep.errors import ConfigError, Fault
from superstep.monitor.stopped_process import LOOK_S, Pulse

SECONDS = 2.0
"""Of the processor, for one text. Templates take a few milliseconds."""

BYTES = 1 << 30
"""The most memory of the process: Python and Jinja take 0.1 GB of it."""

MOST_CHARS = 8_000_000
"""The longest text; a million tokens are shorter."""

CHILD = Path(__file__).with_name("template_worker.py")


class ChatProcess:
    """Renders one template. May be shared by threads, which take turns.

    The process starts with the first text and is started anew after one that ended it. It ends with its input: when
    this object is closed, or the process that owns it ends.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = Lock()
        self._child: subprocess.Popen[str] | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a template.

        Raises:
            ConfigError: the template is broken, refuses these messages, or asks for too much time or memory.
        """
        return self.render_all([variables])[0]

    def render_all(self, every: Sequence[Mapping[str, Any]]) -> list[str]:
        """The text for each of some variables, all of them at one turn; raises as ``render`` does, or

        Raises:
            Fault: its process was stopped, and another one as well.
        """
        line = json.dumps(every)
        with self._lock:
            try:
                self._start()
                return self._ask(line)
            except Fault:  # a text is a function of what is given: another process says the same
                self._start()
                return self._ask(line)

    def check(self) -> None:
        """Sees that the template can be read at all.

        Raises:
            ConfigError: with the line of the template that cannot.
        """
        with self._lock:
            self._start()

    def close(self) -> None:
        """Ends the process; a later text starts it again."""
        with self._lock:
            self._end()

    def __del__(self) -> None:
        self._end()

    def _start(self) -> None:
        if self._child is not None and self._child.poll() is None:
            return
        self._end()
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # a Ctrl-C on the terminal is the server's to handle
        )
        self._ask(json.dumps({"source": self._source, "seconds": SECONDS, "bytes": BYTES, "chars": MOST_CHARS}))

    def _ask(self, line: str) -> list[str]:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        with _watch(child) as was_stopped:
            try:
                child.stdin.write(line + "\n")
                child.stdin.flush()
                said = child.stdout.readline()
            except BrokenPipeError:
                said = ""
        if not said:
            self._end()
            if was_stopped.is_set():
                raise Fault(
                    f"process {child.pid}, which renders chats, was stopped (SIGSTOP) and did not go on: killed."
                )
            raise ConfigError(
                f"chat template was stopped: it needs more than {SECONDS:g} s or {BYTES >> 20} MiB; mend it."
            )
        told = json.loads(said)
        if "error" in told:
            raise ConfigError(f"chat template cannot be rendered: {told['error']}.")
        return [str(text) for text in told["texts"]]

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                _close(pipe)


@contextmanager
def _watch(child: subprocess.Popen[str]) -> Iterator[Event]:
    """Within the block a child that a signal has stopped is killed, and the event set. It uses none of its time up."""
    is_over, was_stopped, pulse = Event(), Event(), Pulse()

    def watch() -> None:
        while not is_over.wait(LOOK_S):
            if pulse.look([child.pid]) is not None:
                was_stopped.set()
                child.kill()
                return

    Thread(target=watch, daemon=True).start()
    try:
        yield was_stopped
    finally:
        is_over.set()


def _close(pipe: Any) -> None:  # noqa: ANN401 - a text pipe, which typeshed does not name
    try:
        pipe.close()
    except BrokenPipeError:
        return  # what was never read is of no use to anyone

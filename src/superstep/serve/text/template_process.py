"""The server's side of the process that renders chat templates: a text, or one line with the reason of a failure."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from superstep.errors import ConfigError, Fault
from superstep.launch.line_process import LineProcess

SECONDS = 2.0
"""CPU seconds of one text. Templates take a few milliseconds."""

BYTES = 1 << 30
"""The most memory of the process; Python and Jinja take 0.1 GB of it."""

MOST_CHARS = 8_000_000
"""The longest text in characters; a million tokens are shorter."""

CHILD = Path(__file__).with_name("template_worker.py")


class TemplateProcess:
    """Renders one template. Thread-safe; threads take turns.

    The process starts with the first text, and again after a text that killed it. It ends when its input closes: when
    this object is closed, or the owning process ends.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = Lock()
        self._child: LineProcess | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a template.

        Raises:
            ConfigError: the template fails, refuses the messages, or exceeds its limits of time or memory.
        """
        return self.render_all([variables])[0]

    def render_all(self, every: Sequence[Mapping[str, Any]]) -> list[str]:
        """The texts for several sets of variables, in one turn; raises as ``render`` does, or

        Raises:
            Fault: its process was stopped, and another one as well.
        """
        request = {"variables": list(every)}
        with self._lock:
            try:
                self._start()
                return self._ask(request)
            except Fault:  # rendering is deterministic: a new process gives the same text
                self._start()
                return self._ask(request)

    def check(self) -> None:
        """Compile the template.

        Raises:
            ConfigError: names the line with the error.
        """
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the process; a later text starts it again."""
        with self._lock:
            self._end()

    def __del__(self) -> None:
        self._end()

    def _start(self) -> None:
        if self._child is not None and self._child.is_there:
            return
        self._end()
        self._child = LineProcess([sys.executable, "-P", str(CHILD)], is_heard=False)
        self._ask({"source": self._source, "seconds": SECONDS, "bytes": BYTES, "chars": MOST_CHARS})

    def _ask(self, request: dict[str, Any]) -> list[str]:
        child = self._child
        assert child is not None
        reply = child.ask(request, math.inf)  # the system ends it once its time is used up
        if reply is None:
            self._end()
            if child.was_stopped:
                raise Fault(
                    f"process {child.pid}, which renders chats, was stopped (SIGSTOP) and did not go on: killed."
                )
            raise ConfigError(
                f"chat template was stopped: it needs more than {SECONDS:g} s or {BYTES >> 20} MiB; mend it."
            )
        if "error" in reply:
            raise ConfigError(f"chat template cannot be rendered: {reply['error']}.")
        return [str(text) for text in reply["texts"]]

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()

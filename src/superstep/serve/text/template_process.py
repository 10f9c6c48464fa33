"""The process that renders chat templates, as the server sees it: a text, or one line that says why not."""

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
"""Of the processor, for one text. Templates take a few milliseconds."""

BYTES = 1 << 30
"""The most memory of the process: Python and Jinja take 0.1 GB of it."""

MOST_CHARS = 8_000_000
"""The longest text; a million tokens are shorter."""

CHILD = Path(__file__).with_name("template_worker.py")


class TemplateProcess:
    """Renders one template. May be shared by threads, which take turns.

    The process starts with the first text and is started anew after one that ended it. It ends with its input: when
    this object is closed, or the process that owns it ends.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = Lock()
        self._child: LineProcess | None = None

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
        request = {"variables": list(every)}
        with self._lock:
            try:
                self._start()
                return self._ask(request)
            except Fault:  # a text is a function of what is given: another process says the same
                self._start()
                return self._ask(request)

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

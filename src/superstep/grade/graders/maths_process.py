"""MathsProcess: the process that compares formulas, with a deadline for each answer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Literal

from superstep.errors import ConfigError, Fault
from superstep.launch.line_process import LineProcess, explain_no_answer

CHILD = Path(__file__).with_name("maths_child.py")

START_S = 60.0
"""Seconds to import sympy; half a second on an idle machine."""

BYTES = 1 << 30
"""Address space; sympy takes 0.2 GB."""


class MathsProcess:
    """Compares formulas. The process starts with the first one, and again after a formula ended it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._child: LineProcess | None = None

    def compare(self, expected: str, given: str) -> Literal["same", "other", "timeout", "memory"]:
        """Whether two formulas in LaTeX mean the same.

        Raises:
            ConfigError: math-verify is not installed, or the expected formula cannot be read.
            Fault: the process does not start, or was stopped from outside, which no formula does.
        """
        child = self._start()
        reply = child.ask({"expected": expected, "given": given}, self._seconds)
        if reply is None:
            self.close()
            if child.was_stopped:
                raise Fault(f"the comparison of formulas: {explain_no_answer(child, self._seconds)}.")
            return "timeout"
        if reply.get("memory"):
            self.close()
            return "memory"
        if "error" in reply:
            raise ConfigError(f"expected = {expected!r}: {reply['error']}; write it in LaTeX.")
        return "same" if reply["same"] else "other"

    def close(self) -> None:
        """End the process; a later formula starts it again."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _start(self) -> LineProcess:
        if self._child is not None and self._child.is_there:
            return self._child
        self.close()
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("math-verify is not installed, which reads formulas: pip install 'superstep[grade]'.")
        self._child = LineProcess([sys.executable, "-P", str(CHILD)], is_heard=False)
        if self._child.ask({"seconds": self._seconds, "bytes": BYTES}, START_S) is None:
            self.close()
            raise Fault("the process that compares formulas does not start.")
        return self._child

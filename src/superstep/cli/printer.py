"""The console of a verb that shows lines alone: standard output, and standard error for what went wrong."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from superstep.run.console import Silent


@dataclass(frozen=True, slots=True)
class Printer(Silent):
    """Standard output and standard error of the process that uses it."""

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def warn(self, text: str) -> None:
        """Print a line to standard error, as errors are."""
        print(f"superstep: {text}", file=sys.stderr, flush=True)

"""The console of a run that a command has started."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from superstep.cli.printer import Printer
from superstep.cli.train.display import open_display, restore
from superstep.run.console import Display


@dataclass(frozen=True, slots=True)
class Terminal(Printer):
    """A printer that shows training as well."""

    def open_display(self, *, mfu_convention: str, log_every: int) -> Display:
        """The display for standard output."""
        return open_display(sys.stdout, mfu_convention=mfu_convention, log_every=log_every)

    def restore(self) -> None:
        """Restore the terminal after a killed rank."""
        restore(sys.stdout)

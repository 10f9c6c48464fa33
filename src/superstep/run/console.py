"""Where a run says what it does: a terminal, or nowhere. ``run`` itself prints nothing."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from superstep.observe.events import Event, Sink


class Display(Sink, Protocol):
    """A sink that shows events while its ``with`` block runs."""

    def __enter__(self) -> Self:
        """Take the terminal."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back, by whatever way the block ends."""


class Console(Protocol):
    """What shows a run to whoever started it. Rank 0 gets it too, so it can be pickled."""

    def say(self, text: str) -> None:
        """Show a line."""

    def warn(self, text: str) -> None:
        """Show a line about what went wrong."""

    def open_display(self, *, mfu_convention: str, log_every: int) -> Display:
        """Show the events of training.

        Args:
            mfu_convention: what the MFU counts, in a few words.
            log_every: steps from one line to the next, where lines are shown.
        """

    def restore(self) -> None:
        """Give back a terminal that a killed rank had taken."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A console that shows nothing, for runs that a program starts: what they report is in their folder."""

    def say(self, text: str) -> None:
        """Nothing is shown."""

    def warn(self, text: str) -> None:
        """Nothing is shown."""

    def open_display(self, *, mfu_convention: str, log_every: int) -> Display:
        """A display that shows nothing."""
        del mfu_convention, log_every
        return NoDisplay()

    def restore(self) -> None:
        """No terminal was taken."""


class NoDisplay:
    """A display that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held."""

    def write(self, event: Event) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing is held."""

"""Console of a run: a terminal, or nothing. ``run`` itself prints nothing."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from superstep.observe.events import Event, Sink


class Display(Sink, Protocol):
    """A sink that shows events while its ``with`` block runs."""

    def __enter__(self) -> Self:
        """Take over the terminal."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the terminal at the end of the block."""


class Console(Protocol):
    """Shows a run to its user. Rank 0 gets it too, so it can be pickled."""

    def say(self, text: str) -> None:
        """Show a line."""

    def warn(self, text: str) -> None:
        """Show a warning."""

    def open_display(self, *, mfu_convention: str, log_every: int) -> Display:
        """A display of the events of training.

        Args:
            mfu_convention: what the MFU counts, in a few words.
            log_every: steps between lines.
        """

    def restore(self) -> None:
        """Restore a terminal that a killed rank had taken over."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A console that shows nothing, for runs from a program: their reports are in their folder."""

    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def open_display(self, *, mfu_convention: str, log_every: int) -> Display:
        del mfu_convention, log_every
        return NoDisplay()

    def restore(self) -> None: ...


SILENT = Silent()


class NoDisplay:
    """A display that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def write(self, event: Event) -> None: ...
    def close(self) -> None: ...

"""The display of a run: a block that redraws itself on a terminal, plain lines anywhere else.

event ──► Progress.add ──► frame(progress, width, now)      styled lines, drawn four times a second
                      └──► lines(event, progress, now)      text for a log
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, ConsoleRenderable, Group
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from superstep.cli.train.progress import Progress
from superstep.cli.train.progress_frame import frame
from superstep.cli.train.progress_lines import lines
from superstep.errors import Fault
from superstep.observe.events import Event, LossDetails, StepDone
from superstep.run.console import Display


def open_display(stream: TextIO, *, mfu_convention: str, log_every: int) -> Display:
    """The display for ``stream``: live on a terminal that can move its cursor, plain lines otherwise.

    ``mfu_convention`` says in a few words what the MFU counts; ``log_every`` is in steps, for plain lines.
    """
    console = Console(file=stream, highlight=False)
    if stream.isatty() and not console.is_dumb_terminal:
        return LiveDisplay(console, mfu_convention=mfu_convention)
    return PlainDisplay(stream, mfu_convention=mfu_convention, log_every=log_every)


def restore(stream: TextIO) -> None:
    """Restore a terminal after a killed process: an empty line, and the cursor."""
    if stream.isatty() and not Console(file=stream).is_dumb_terminal:
        stream.write("\r\x1b[K\x1b[?25h")
        stream.flush()


class PlainDisplay:
    """Appends lines: the first step, each ``log_every``-th and the last; validation, checkpoint and routers' report."""

    def __init__(self, stream: TextIO, *, mfu_convention: str, log_every: int) -> None:
        self._stream = stream
        self._log_every = log_every
        self._progress = Progress(mfu_convention=mfu_convention)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, event: Event) -> None:
        """Print an event, if it is due.

        Raises:
            Fault: the reader has left, or the output is full.
        """
        is_first = self._progress.step is None
        now = time.monotonic()
        self._progress.add(event, now)
        if isinstance(event, StepDone | LossDetails):
            is_last = event.step == self._progress.steps
            if event.step % self._log_every and not is_first and not is_last:
                return
        try:
            for text in lines(event, self._progress, now):
                print(text, file=self._stream, flush=True)
        except OSError as error:
            reason = "the program that reads it has ended" if isinstance(error, BrokenPipeError) else error.strerror
            step = self._progress.step.step if self._progress.step else -1
            raise Fault(
                f"standard output cannot be written: {reason}. Send it to a file, and resume the run.", step=step
            ) from error

    def close(self) -> None:
        """Nothing to close: the caller owns the stream."""


class LiveDisplay:
    """Redraws one block in place; other output scrolls by above it."""

    def __init__(self, console: Console, *, mfu_convention: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._progress = Progress(mfu_convention=mfu_convention)
        self._live = _ReflowingLive(self._draw, console)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, event: Event) -> None:
        """Add the event; the block shows it within a quarter of a second."""
        self._progress.add(event, self._clock())

    def close(self) -> None:
        """Draw the last state, leave it on the screen and show the cursor again."""
        self._live.stop()

    def _draw(self) -> list[Text]:
        return frame(
            self._progress,
            width=self._console.width,
            now=self._clock(),
            is_ascii=self._console.options.ascii_only,
        )


class _ReflowingLive(Live):
    """``Live`` that also erases wrapped lines of the last frame on a narrowed terminal.

    A terminal that gets narrower wraps the lines that no longer fit, and a frame of n lines takes more rows than that;
    ``Live`` goes up n of them and leaves the rest behind.
    """

    def __init__(self, draw: Callable[[], list[Text]], console: Console) -> None:
        self._draw = draw
        self._frame: list[Text] = []
        self._columns_on_screen: list[int] = []
        super().__init__(console=console, get_renderable=self._take)

    def _take(self) -> Group:
        self._frame = self._draw()
        return Group(*self._frame)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """``Live``'s output, with the wrapped rows erased between its erasing and its drawing."""
        erase, *rest = super().process_renderables(renderables)
        width = max(1, self.console.width)
        wrapped_rows = sum(max(0, columns - 1) // width for columns in self._columns_on_screen)
        self._columns_on_screen = [min(text.cell_len, width) for text in self._frame]
        up = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * wrapped_rows
        return [erase, Control(*up), *rest]

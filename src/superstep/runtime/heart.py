"""The heart: what a rank is doing, in memory that the launcher reads.

    rank      begin ── waits 0 ─ works 0 ── waits 1 ─ works 1 ── ... ── rests     a store into the page each, no call
    ticker    tick ─ tick ─ tick ─ tick ...                                       a thread: whether Python runs at all
    launcher  looks at the pages a few times a second (``runtime.hang``)

A beat is a dozen words that are copied into a page of shared memory; the system is not asked for anything. It tells
which step and which instruction, and whether the rank computes it or waits until it can: who waits for another rank is
not the one that hangs. The page has no name and no file, and the launcher keeps it when the rank has gone.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from superstep.program.instructions import Instruction
from superstep.program.text import describe

PAGE = 4096
TEXT_BYTES = 64

TICK_S = 0.1
"""How often the ticker notes that Python runs."""

TICKS_KEPT = 600
"""The longest pause between two ticks is that of the last one or two times so many."""

_BEAT = struct.Struct(f"<6Q{TEXT_BYTES}s")
_TICK = struct.Struct("<3Q")
_EXPECTED = struct.Struct("<Q")
_TICK_AT, _EXPECTED_AT = 512, 1024
_READS = 8


class Doing(IntEnum):
    """What a rank does."""

    OTHER = 0
    """Nothing of a program: it reads a batch, say, or writes a checkpoint."""
    WAITS = 1
    """For what an instruction needs of another rank."""
    WORKS = 2
    """On an instruction."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a page says.

    Attributes:
        beats: how many there were; 0 of a rank that has run no program.
        doing: what it does since the last one.
        step: the step that it is in, or was last.
        index: of the instruction in its list.
        longest_s: what working on this instruction has taken at most in this process; 0.0 the first time.
        instruction: in words; empty outside of a program.
        ticks: of its ticker.
        ticker: the number of that thread; 0 without one.
        pause_s: the longest between two ticks of the last minute or two.
        expected_s: what a whole step was predicted to take; 0.0 where it was not.
    """

    beats: int
    doing: Doing
    step: int
    index: int
    longest_s: float
    instruction: str
    ticks: int
    ticker: int
    pause_s: float
    expected_s: float


@dataclass(slots=True)
class _Known:
    """A list of instructions that runs again and again: the texts, and the longest that each has taken."""

    instructions: Sequence[Instruction]
    texts: list[bytes]
    longest_ns: list[int] = field(default_factory=list)


class Beats(Protocol):
    """Told what a rank does."""

    def begin(self, instructions: Sequence[Instruction], *, step: int) -> None:
        """The list runs from here on, in so manieth a step."""

    def waits(self, index: int | None = None) -> None:
        """For what the instruction needs: the one of that number, or the one that it is at."""

    def works(self, index: int | None = None) -> None:
        """On it."""

    def rests(self) -> None:
        """The list is done with, whether or not to its end."""

    def expect(self, step_s: float) -> None:
        """A step was predicted to take so long."""


class Unwatched:
    """Beats of a rank that nobody looks at."""

    def begin(self, instructions: Sequence[Instruction], *, step: int) -> None:
        """Nothing."""

    def waits(self, index: int | None = None) -> None:
        """Nothing."""

    def works(self, index: int | None = None) -> None:
        """Nothing."""

    def rests(self) -> None:
        """Nothing."""

    def expect(self, step_s: float) -> None:
        """Nothing."""


class Heart:
    """A rank's side of its page.

    Args:
        handle: a descriptor of the page, which is closed.
        clock: nanoseconds.
    """

    def __init__(self, handle: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._view = mmap.mmap(handle, PAGE)
        os.close(handle)
        self._clock = clock
        self._known: dict[int, _Known] = {}
        self._now = _Known((), [b""], [0])
        self._beats, self._step, self._at, self._began_ns = 0, 0, 0, 0
        self._works = self._ticks = False

    def begin(self, instructions: Sequence[Instruction], *, step: int) -> None:
        """The list runs from here on, in so manieth a step."""
        known = self._known.get(id(instructions))
        if known is None or known.instructions is not instructions:
            texts = [describe(each).encode()[:TEXT_BYTES] for each in instructions]
            known = self._known[id(instructions)] = _Known(instructions, texts, [0] * len(texts))
        self._now, self._step, self._at = known, step, 0

    def waits(self, index: int | None = None) -> None:
        """For what the instruction needs: the one of that number, or the one that it is at."""
        self._beat(Doing.WAITS, index)

    def works(self, index: int | None = None) -> None:
        """On it."""
        self._beat(Doing.WORKS, index)

    def rests(self) -> None:
        """The list is done with, whether or not to its end. After the first one Python's pauses begin to count."""
        self._beat(Doing.OTHER, None)
        if not self._ticks:
            self._ticks = True
            threading.Thread(target=self._tick, name="superstep-ticker", daemon=True).start()

    def _beat(self, doing: Doing, index: int | None) -> None:
        now_ns, known = self._clock(), self._now
        if self._works:
            took_ns = now_ns - self._began_ns
            if took_ns > known.longest_ns[self._at]:
                known.longest_ns[self._at] = took_ns
        at = self._at if index is None else index
        self._at, self._began_ns, self._works = at, now_ns, doing is Doing.WORKS
        self._beats += 1
        text = known.texts[at] if doing else b""
        _BEAT.pack_into(self._view, 0, self._beats, doing, self._step, at, known.longest_ns[at], self._beats, text)

    def expect(self, step_s: float) -> None:
        """A step was predicted to take so long."""
        _EXPECTED.pack_into(self._view, _EXPECTED_AT, int(1e9 * step_s))

    def _tick(self) -> None:
        ticks, last_ns, me = 0, self._clock(), threading.get_native_id()
        before_ns = longest_ns = 0
        while True:
            now_ns = self._clock()
            longest_ns, last_ns, ticks = max(longest_ns, now_ns - last_ns), now_ns, ticks + 1
            if ticks % TICKS_KEPT == 0:
                before_ns, longest_ns = longest_ns, 0
            _TICK.pack_into(self._view, _TICK_AT, ticks, me, max(before_ns, longest_ns))
            time.sleep(TICK_S)


class Page:
    """The launcher's side: makes the page, hands it to a rank by its descriptor, and reads it."""

    def __init__(self) -> None:
        self.handle = os.memfd_create("superstep-heart")
        os.ftruncate(self.handle, PAGE)
        self._view = mmap.mmap(self.handle, PAGE)

    def read(self) -> Beat:
        """What is there. A beat that the rank is just writing is read again."""
        raw = self._view[: _BEAT.size]
        for _ in range(_READS):
            again = self._view[: _BEAT.size]
            if again == raw:
                break
            raw = again
        beats, doing, step, index, longest_ns, _, text = _BEAT.unpack(raw)
        ticks, ticker, pause_ns = _TICK.unpack_from(self._view, _TICK_AT)
        (expected_ns,) = _EXPECTED.unpack_from(self._view, _EXPECTED_AT)
        return Beat(
            beats=beats,
            doing=Doing(doing),
            step=step,
            index=index,
            longest_s=longest_ns / 1e9,
            instruction=text.rstrip(b"\0").decode(errors="replace"),
            ticks=ticks,
            ticker=ticker,
            pause_s=pause_ns / 1e9,
            expected_s=expected_ns / 1e9,
        )

    def close(self) -> None:
        """Let go of it."""
        self._view.close()
        os.close(self.handle)


def page() -> Page | None:
    """A page for one rank; None of a system that has no memory without a name."""
    return Page() if hasattr(os, "memfd_create") else None

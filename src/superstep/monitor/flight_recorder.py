"""The flight recorder: a rank's last instructions and their times, in shared memory that outlives the rank.

    page     what the rank does now                     ``monitor.status_page``
    notes    NOTES slots: the n-th note, from 1 on, is in slot n modulo NOTES
    words    the texts of instructions, one a line: a note has its line's number. Each list of instructions is
             contiguous, with an empty line after it

A note is only a store into memory. Its line is written before the first note of it, so the memory alone says what ran.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence

from superstep.monitor.page_layout import PAGE_BYTES, WORDS_USED
from superstep.observe.doctor.observations import Note

NOTES = 2**14
WORDS_BYTES = 2**24
"""Room for words; memory is allocated as it is written."""

_NOTE = struct.Struct("<4Q4I")
_WORDS_AT = PAGE_BYTES + NOTES * _NOTE.size
BYTES = _WORDS_AT + WORDS_BYTES

NOWHERE = 0
"""The line of what has no words."""

BESIDE = "beside: "
"""The prefix of a line of work outside a program."""


class FlightRecorder:
    """The rank's side. ``view``: the memory, ``BYTES`` long."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._used = self._lines = self._noted = 0
        self.lay(("",))

    def lay(self, lines: Sequence[str]) -> int:
        """Write lines as one list; returns the first one's number, or NOWHERE without room."""
        text = "".join(f"{line}\n" for line in (*lines, "")).encode()
        if self._used + len(text) > WORDS_BYTES:
            return NOWHERE
        at, first = _WORDS_AT + self._used, self._lines
        self._view[at : at + len(text)] = text
        self._used, self._lines = self._used + len(text), first + len(lines) + 1
        WORDS_USED.write(self._view, self._used)
        return first

    def note(self, line: int, run: int, step: int, ready_ns: int, start_ns: int, end_ns: int, within_ns: int) -> None:
        """Note an instruction that has ended, or never will."""
        if line == NOWHERE:
            return
        self._noted += 1
        at = PAGE_BYTES + self._noted % NOTES * _NOTE.size
        _NOTE.pack_into(
            self._view, at, ready_ns, start_ns, end_ns, within_ns, self._noted & 0xFFFFFFFF, run, step, line
        )


class RecordedLines:
    """A copy of the lines in a memory. ``view``: the memory; one without room for notes has no lines."""

    def __init__(self, view: mmap.mmap) -> None:
        (used,) = WORDS_USED.read(view)
        self.lines = view[_WORDS_AT : _WORDS_AT + used].decode(errors="replace").split("\n")
        self._first: list[int] = []
        for at, line in enumerate(self.lines):
            self._first.append(self._first[-1] if at and line and self.lines[at - 1] else at)

    def place(self, line: int) -> int:
        """A line's index in its list."""
        return line - self._first[line]

    def around(self, line: int) -> list[str]:
        """All lines of a line's list."""
        first = last = self._first[line]
        while last < len(self.lines) and self.lines[last]:
            last += 1
        return self.lines[first:last]


def notes_in(view: mmap.mmap, words: RecordedLines) -> list[Note]:
    """The notes in memory, oldest first, without one that is just being written."""
    once, again = (view[PAGE_BYTES:_WORDS_AT] for _ in range(2))
    whole = [raw for raw, other in zip(_slots(once), _slots(again), strict=True) if raw == other and any(raw)]
    records = sorted((raw for raw in whole if raw[7] < len(words.lines)), key=lambda raw: raw[4])
    newest = records[-1][4] if records else 0
    notes = []
    for ready_ns, start_ns, end_ns, within_ns, number, run, step, line in records:
        if number <= newest - NOTES:
            continue
        what = words.lines[line]
        index = -1 if what.startswith(BESIDE) else words.place(line)
        seconds = (each / 1e9 for each in (ready_ns, start_ns, end_ns, within_ns))
        notes.append(Note(run, step, index, what.removeprefix(BESIDE), *seconds))
    return notes


def _slots(raw: bytes) -> Iterator[tuple[int, ...]]:
    return _NOTE.iter_unpack(raw)

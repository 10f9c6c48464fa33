"""How a rank's process has grown: its resident bytes now and then since it began, in its page.

There is room for ROOM of them. Where it is full every second one goes, and the next come half as often: so they always
reach from the beginning to now.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from superstep.observe.doctor.seen import Memory

ROOM = 64
FIRST_EVERY_S = 2.0
"""How often it is looked at first."""

_COUNT = struct.Struct("<Q")
_LOOK = struct.Struct("<2Q")
_COUNT_AT, _LOOKS_AT = 2040, 2048


class Resident:
    """The side of the rank, which looks at itself.

    Args:
        view: its page.
        statm: of the process.
    """

    def __init__(self, view: mmap.mmap, statm: Path = Path("/proc/self/statm")) -> None:
        self._view, self._statm = view, statm
        self._every_ns, self._next_ns = int(1e9 * FIRST_EVERY_S), 0
        self._looks: list[tuple[int, int]] = []

    def look(self, now_ns: int) -> None:
        """Note the size, where it is time to."""
        if now_ns < self._next_ns:
            return
        try:
            resident_bytes = int(self._statm.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):  # a system without /proc
            return
        if len(self._looks) == ROOM:
            self._looks = self._looks[::2]
            self._every_ns *= 2
            self._write(0)
        self._looks.append((now_ns, resident_bytes))
        self._next_ns = now_ns + self._every_ns
        self._write(len(self._looks) - 1)

    def _write(self, first: int) -> None:
        for at in range(first, len(self._looks)):
            _LOOK.pack_into(self._view, _LOOKS_AT + at * _LOOK.size, *self._looks[at])
        _COUNT.pack_into(self._view, _COUNT_AT, len(self._looks))


def sizes_in(view: mmap.mmap) -> tuple[Memory, ...]:
    """What is in a page, oldest first."""
    (count,) = _COUNT.unpack_from(view, _COUNT_AT)
    found = (_LOOK.unpack_from(view, _LOOKS_AT + at * _LOOK.size) for at in range(min(count, ROOM)))
    return tuple((now_ns / 1e9, size) for now_ns, size in found)

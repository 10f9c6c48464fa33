"""A rank's resident bytes over time since its process began, in its status page.

Where the room is full, every second entry is dropped and the interval doubles, so the entries always span the whole
time.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from superstep.monitor.page_layout import SIZES, SIZES_COUNT
from superstep.observe.doctor.observations import Memory

FIRST_EVERY_S = 2.0
"""The first interval."""


class ResidentMemory:
    """The rank's side. ``view``: its page. ``statm``: of the process."""

    def __init__(self, view: mmap.mmap, statm: Path = Path("/proc/self/statm")) -> None:
        self._view, self._statm = view, statm
        self._every_ns, self._next_ns = int(1e9 * FIRST_EVERY_S), 0
        self._looks: list[tuple[int, int]] = []

    def look(self, now_ns: int) -> None:
        """Note the size, if the interval has passed."""
        if now_ns < self._next_ns:
            return
        try:
            resident_bytes = int(self._statm.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):  # a system without /proc
            return
        if len(self._looks) == SIZES.count:
            self._looks = self._looks[::2]
            self._every_ns *= 2
            self._write(0)
        self._looks.append((now_ns, resident_bytes))
        self._next_ns = now_ns + self._every_ns
        self._write(len(self._looks) - 1)

    def _write(self, first: int) -> None:
        for at in range(first, len(self._looks)):
            SIZES.write(self._view, *self._looks[at], index=at)
        SIZES_COUNT.write(self._view, len(self._looks))


def sizes_in(view: mmap.mmap) -> tuple[Memory, ...]:
    """The sizes in a page, oldest first."""
    (count,) = SIZES_COUNT.read(view)
    sizes = (SIZES.read(view, at) for at in range(min(count, SIZES.count)))
    return tuple((now_ns / 1e9, size) for now_ns, size in sizes)

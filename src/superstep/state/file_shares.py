"""Which rank writes which bytes of a file, if ranks have several page caches.

Two hosts that write different bytes of one page of a network file system may each send the whole page to the server,
with stale bytes for the rest. The later one undoes the earlier. So a page that hosts share is written by one of them,
and the others send their bytes to it:

    file        |  granule  |  granule  |  granule  |
    host A      ============            .            .
    host B      .      ==================            .      the first granule is shared: one rank of A or B owns it
    host C      .           .           =============

Within one page cache all is coherent: there all ranks write directly.
"""

from __future__ import annotations

import os
import platform
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRANULE = 1 << 16
"""Bytes; no Linux has larger pages than these for files."""

STRETCH = 256 * GRANULE
"""Bytes of consecutive shared granules with one owner; the next have another owner, to divide the work."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Claim:
    """The ranges that one rank will write.

    Attributes:
        cache: its page cache.
        ranges: for each file the ranges of bytes, in whole granules, ascending and disjoint.
    """

    cache: str
    ranges: Mapping[str, Sequence[Range]]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes that several page caches would write, and the rank that writes them."""

    low: int
    high: int
    owner: int


@dataclass(frozen=True, slots=True)
class FileShares:
    """The writer of each range, the same on every rank."""

    caches: tuple[str, ...]
    stretches: Mapping[str, Sequence[Stretch]]

    def parts(self, rank: int, file: str, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Split ``rank``'s bytes ``low`` to ``high`` into (low, high, the rank that writes them)."""
        stretches = self.stretches.get(file, ())
        at = max(bisect_right(stretches, low, key=lambda stretch: stretch.low) - 1, 0)
        while low < high and at < len(stretches):
            stretch = stretches[at]
            at += 1
            if stretch.high <= low:
                continue
            if low < stretch.low:
                yield low, min(high, stretch.low), rank
                low = min(high, stretch.low)
            if low < high:
                is_here = self.caches[stretch.owner] == self.caches[rank]
                yield low, min(high, stretch.high), rank if is_here else stretch.owner
                low = min(high, stretch.high)
        if low < high:
            yield low, high, rank


def page_cache(folder: Path) -> str:
    """A name for the page cache of this process's view of a folder: the same for all who share it."""
    return f"{running_system()} {os.stat(folder).st_dev}"


def running_system() -> str:
    """A name for this machine since its boot: equal names share the kernel, its caches and its clock."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        kernel = f"{uuid.getnode():x}"
    return f"{platform.node()} {kernel}"


def granules(ranges: Iterable[Range]) -> list[Range]:
    """Ranges of bytes in whole granules, ascending, with adjacent ones joined."""
    rounded: list[Range] = []
    for low, high in sorted((low // GRANULE * GRANULE, -(-high // GRANULE) * GRANULE) for low, high in ranges):
        if rounded and low <= rounded[-1][1]:
            rounded[-1] = rounded[-1][0], max(high, rounded[-1][1])
        else:
            rounded.append((low, high))
    return rounded


def share_out(claims: Sequence[Claim]) -> FileShares:
    """The writers, from the claims of all ranks."""
    caches = tuple(claim.cache for claim in claims)
    files = {file for claim in claims for file in claim.ranges} if len(set(caches)) > 1 else set()
    return FileShares(caches, {file: tuple(_stretches(file, claims)) for file in sorted(files)})


def _stretches(file: str, claims: Sequence[Claim]) -> Iterator[Stretch]:
    edges: dict[int, list[int]] = {}
    for rank, claim in enumerate(claims):
        for edge in (edge for span in claim.ranges.get(file, ()) for edge in span):
            edges.setdefault(edge, []).append(rank)
    inside: set[int] = set()
    low = number = 0
    for edge in sorted(edges):
        if len({claims[rank].cache for rank in inside}) > 1:
            owners = sorted(inside)
            for start in range(low, edge, STRETCH):
                yield Stretch(start, min(start + STRETCH, edge), owners[number % len(owners)])
                number += 1
        inside ^= set(edges[edge])
        low = edge

"""The shared memory of a host's ranks: an anonymous file, of which each group has a part.

    the first rank of a host     makes the file, and tells the others where it is open
    each of them                 opens it there, and keeps one byte of it locked for as long as it lives

The file is in no folder: nothing is left of it once the last process that has it open has ended. The system releases a
lock with its process, so others see that the process has gone. Pages are allocated when they are written.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from superstep.comm.shared_memory.channel import is_compiled, library
from superstep.state.file_shares import running_system

PART = 2**36
"""Bytes between the parts of two groups; unused pages take no memory."""

PARTS = 2**24
MOST_RANKS = 200
"""The most ranks of a group: the data of each pair must fit in the group's part."""

KEY_BYTES = 16
KEY_AT = 2**20
"""The place of the file's key: after the locks, one byte for each rank, and before the first part."""


class Region:
    """This host's file, open as long as this object exists.

    Attributes:
        file: its descriptor. Closing another descriptor of the file would release the locks.
        hosts: for each launched rank, a number for its host.
        native: the C++ library.
    """

    def __init__(self, file: int, hosts: Sequence[int], rank: int, native: ctypes.CDLL) -> None:
        self.file = file
        self.native = native
        self.hosts = tuple(hosts)
        self.rank = rank

    def __del__(self) -> None:
        os.close(self.file)

    @property
    def neighbours(self) -> int:
        """The number of ranks of this host."""
        return self.hosts.count(self.hosts[self.rank])

    def is_shared_by(self, ranks: Sequence[int]) -> bool:
        """Whether all ranks are on one host, and no more than a group can have."""
        return len(ranks) <= MOST_RANKS and len({self.hosts[rank] for rank in ranks}) == 1

    def by_host(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The ranks of a group over several hosts, by host, where they follow each other with equally many on each,
        more than one; else nothing.
        """
        hosts = tuple(tuple(of) for _, of in groupby(sorted(ranks), key=lambda rank: self.hosts[rank]))
        sizes = {len(of) for of in hosts}
        is_split = len(hosts) > len({self.hosts[rank] for rank in ranks})
        return hosts if len(hosts) > 1 and len(sizes) == 1 and 1 < min(sizes) <= MOST_RANKS and not is_split else ()

    def part(self, number: int) -> int:
        """The begin of a group's part, by its number: the same on all ranks."""
        if not 0 <= number < PARTS - 1:
            raise OverflowError(f"group {number} of a run: a host's file has room for {PARTS - 1}")
        return (number + 1) * PART


@dataclass(frozen=True, slots=True)
class _Offer:
    """A file that a rank has open and could share.

    Attributes:
        process: the id of the process that has it open.
        file: its descriptor there.
        key: its content, to verify it.
        is_ready: whether the C++ library is compiled there.
    """

    host: str
    process: int
    file: int
    key: bytes
    is_ready: bool


def open_shared_region(rank: int, world: int, gather: Callable[[Any, Any], list[Any]]) -> tuple[Region | None, str]:
    """The file of this rank's host; or None, and why, where a rank cannot have its own. Every launched rank calls this
    together. ``gather``: gives every rank's value, of a stated type, to every rank.
    """
    offer = _offer()
    offers = [each for each in gather(offer, _Offer | None) if each is not None]
    if offer is None or len(offers) < world:
        if offer is not None:
            os.close(offer.file)
        return None, "a rank's system has no files without a name"
    names = [each.host for each in offers]
    first = offers[names.index(offer.host)]
    if not all(each.is_ready for each in offers):
        # One rank of a host compiles, and the others wait for it.
        if first == offer:
            library()
        gather(None, None)
    built, region = library(), None
    if built.library is not None:
        with contextlib.suppress(OSError):
            file = _open_locked(offer.file, rank) if first == offer else _open_offer(first, rank)
            region = Region(file, [names.index(name) for name in names], rank, built.library)
    has_all = all(gather(region is not None, bool))
    # Only now: until then another rank may be about to open it.
    if region is None or region.file != offer.file:
        os.close(offer.file)
    return (region, "") if has_all else (None, built.why or "a rank cannot share memory")


def _offer() -> _Offer | None:
    """A new file; None where the system has no anonymous files."""
    try:
        # Ranks that reach each other over a network only, as in containers, are hosts of their own.
        host = f"{running_system()} {os.stat('/proc/self/ns/net').st_ino}"
        file = os.memfd_create("superstep")
    except (AttributeError, OSError):
        return None
    key = secrets.token_bytes(KEY_BYTES)
    try:
        os.ftruncate(file, PART * PARTS)
        os.pwrite(file, key, KEY_AT)
    except OSError:  # a limit on the size of files, say
        os.close(file)
        return None
    return _Offer(host, os.getpid(), file, key, is_compiled())


def _open_offer(offer: _Offer, rank: int) -> int:
    """Open the file that another process has open."""
    file = os.open(Path(f"/proc/{offer.process}/fd/{offer.file}"), os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(file, KEY_BYTES, KEY_AT) != offer.key:  # a process of another container has that number
            raise FileNotFoundError
        return _open_locked(file, rank)
    except OSError:
        os.close(file)
        raise


def _open_locked(file: int, rank: int) -> int:
    """Open the file again, and lock a byte of it as long as this process lives."""
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    return file

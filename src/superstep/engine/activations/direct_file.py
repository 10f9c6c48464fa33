"""DirectFile: an unnamed file whose blocks pass no page cache, each part with a checksum.

The file has no name, so the system removes it with the process that opened it, however that ends. O_DIRECT takes
addresses, places and lengths that are multiples of a block: so parts begin at multiples of it, and go through one
aligned buffer for each direction.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from bisect import insort
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from superstep.errors import ConfigError, DiskFault
from superstep.kernels.checksum import checksum

BLOCK = 4096
BUFFER = 4 * 2**20
"""Bytes that go to the disk in one call."""
WORD = 4


@dataclass(slots=True)
class FilePart:
    """A part of the file.

    Attributes:
        at: its first byte.
        size: bytes of its content.
        room: bytes that it takes, whole blocks.
        sum: the checksum of its content; None until it is written.
    """

    at: int
    size: int
    room: int
    sum: int | None = None


class DirectFile:
    """The file, and which of its parts are free.

    Args:
        folder: of the file; its file system must take O_DIRECT.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = open_direct(folder)
        weakref.finalize(self, os.close, self._fd)
        self._free: list[tuple[int, int]] = []
        self._end = 0
        self._out, self._in = _Buffer(), _Buffer()

    @property
    def fd(self) -> int:
        return self._fd

    def allocate(self, size: int) -> FilePart:
        """A part for ``size`` bytes: the first free one that is large enough, or the end. Raises DiskFault: the disk is
        full.
        """
        room = -(-size // BLOCK) * BLOCK
        for number, (at, length) in enumerate(self._free):
            if length >= room:
                del self._free[number]
                if length > room:
                    insort(self._free, (at + room, length - room))
                return FilePart(at, size, room)
        at = self._end
        try:
            os.posix_fallocate(self._fd, at, room)
        except OSError as error:
            raise self._fault("grow", error) from error
        self._end += room
        return FilePart(at, size, room)

    def free(self, part: FilePart) -> None:
        """Let another part take its place."""
        insort(self._free, (part.at, part.room))
        merged: list[tuple[int, int]] = []
        for at, length in self._free:
            if merged and sum(merged[-1]) == at:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((at, length))
        self._free = merged

    def write(self, part: FilePart, content: Tensor) -> None:
        """Write a part; raises DiskFault where the system cannot. ``content``: bytes, [part.size], on any device."""
        total = 0
        for at in range(0, part.size, BUFFER):
            count = min(BUFFER, part.size - at)
            length = self._out.fill(content[at : at + count])
            total += self._out.sum(count, at)
            try:
                written = os.pwrite(self._fd, self._out.view(length), part.at + at)
            except OSError as error:
                raise self._fault("be written", error) from error
            if written != length:
                raise self._fault("be written", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        part.sum = total

    def read(self, part: FilePart, into: Tensor) -> None:
        """Read a part; raises DiskFault where the system cannot, or where the content is not what was written."""
        assert part.sum is not None, "activations are read before they are written"
        total = 0
        for at in range(0, part.size, BUFFER):
            count = min(BUFFER, part.size - at)
            length = -(-count // BLOCK) * BLOCK
            try:
                read = os.preadv(self._fd, [self._in.view(length)], part.at + at)
            except OSError as error:
                raise self._fault("be read", error) from error
            if read < count:
                raise self._fault("be read", OSError(errno.EIO, os.strerror(errno.EIO)))
            total += self._in.sum(count, at)
            into[at : at + count].copy_(self._in.bytes[:count])
        if total != part.sum:
            raise DiskFault(
                f"activations in '{self._folder}' are not what was written (checksum {total & SUM_MASK:016x}, written "
                f"{part.sum & SUM_MASK:016x}): the disk or its memory is damaged; the step is not taken."
            )

    def _fault(self, verb: str, error: OSError) -> DiskFault:
        return DiskFault(f"the file of activations in '{self._folder}' cannot {verb}: {error.strerror}.")


SUM_MASK = 2**64 - 1


class _Buffer:
    """Aligned memory."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, BUFFER)  # begins at a page
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, length: int) -> memoryview:
        return memoryview(self._map)[:length]

    def fill(self, content: Tensor) -> int:
        """Copy bytes in, zeros behind them; returns the length in whole blocks."""
        count = content.numel()
        length = -(-count // BLOCK) * BLOCK
        self.bytes[:count].copy_(content)
        self.bytes[count:length].zero_()
        return length

    def sum(self, count: int, at: int) -> int:
        """The checksum of the first bytes, which lie at ``at`` of their part."""
        words = self.bytes[: -(-count // WORD) * WORD].view(torch.int32)
        return int(checksum(words, at // WORD))


def open_direct(folder: Path) -> int:
    """The descriptor of a new unnamed file in a folder.

    Raises:
        ConfigError: the folder's file system has no unnamed files, or no O_DIRECT.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return os.open(folder, os.O_TMPFILE | os.O_DIRECT | os.O_RDWR, 0o600)
    except OSError as error:
        raise ConfigError(
            f"plan.activations = 'disk' needs files that no cache holds (O_TMPFILE, O_DIRECT), and '{folder}' has "
            f"none: {error.strerror}; set state.dir to a folder on a disk."
        ) from error

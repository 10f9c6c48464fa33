"""Writes a rank's bytes into an unfinished checkpoint.

A rank writes its own ranges directly. Bytes for another rank's ranges go into a parcel for that rank, a file that no
third rank uses; once all parcels are closed, each rank writes those addressed to it.

Bytes are written, not mapped: a failing disk then raises here, and no page is read before it is overwritten. But a
block of columns is many short runs, for each of which the ranks of a host would wait for each other's lock of the file:
with a common page cache, those are mapped. Their space is allocated before.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from superstep.state.file_shares import FileShares
from superstep.state.tensor_piece import FlatRange

_LABEL = struct.Struct("<HQQ")
"""Header of each run of bytes in a parcel: the number of the file, the offset, the size."""

SHORT_BYTES = 1 << 18
"""Runs shorter than this on average are mapped, if there are several."""


class Writer:
    """Writes this rank's bytes; use it within ``writing``, which closes every file."""

    def __init__(self, folder: Path, files: list[str], rank: int, shares: FileShares, stack: ExitStack) -> None:
        self._folder = folder
        self._files = files
        self._rank = rank
        self._shares = shares
        self._stack = stack
        self._handles: dict[str, int] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._parcels: dict[int, IO[bytes]] = {}

    def put_runs(
        self, file: str, offset: int, data: memoryview, ranges: Sequence[FlatRange], element_bytes: int
    ) -> None:
        """Write the runs of a piece, of the tensor that starts at ``offset`` of a file."""
        is_mapped = len(ranges) > 1 and len(data) < SHORT_BYTES * len(ranges) and len(set(self._shares.caches)) == 1
        view = self._map(file) if is_mapped else None
        for run in ranges:
            part = data[element_bytes * run.at : element_bytes * (run.at + run.count)]
            at = offset + element_bytes * run.offset
            if view is None:
                self.put(file, at, part)
            else:
                view[at : at + len(part)] = part

    def put(self, file: str, offset: int, data: memoryview) -> None:
        """Write bytes of a file, from ``offset`` on."""
        for low, high, owner in self._shares.parts(self._rank, file, offset, offset + len(data)):
            part = data[low - offset : high - offset]
            if owner == self._rank:
                self._write(file, low, part)
            else:
                self._pack(owner, file, low, part)

    def unpack(self, sender: int) -> None:
        """Write another rank's parcel for this one.

        Raises:
            OSError: the parcel is incomplete.
        """
        with parcel(self._folder, sender, self._rank).open("rb") as file:
            while label := file.read(_LABEL.size):
                number, offset, size = _LABEL.unpack(label)
                data = file.read(size)
                if len(data) < size:
                    raise OSError(f"{file.name} ends too early")
                self._write(self._files[number], offset, memoryview(data))

    def sync(self) -> list[int]:
        """Wait until everything is on disk; the ranks that have a parcel to unpack."""
        for view in self._maps.values():
            view.flush()
        for handle in self._handles.values():
            os.fsync(handle)
        for file in self._parcels.values():
            file.flush()
            os.fsync(file.fileno())
        return sorted(self._parcels)

    def _write(self, file: str, offset: int, data: memoryview) -> None:
        handle = self._handle(file)
        while data:
            done = os.pwrite(handle, data, offset)
            data, offset = data[done:], offset + done

    def _handle(self, file: str) -> int:
        if file not in self._handles:
            self._handles[file] = os.open(self._folder / file, os.O_RDWR)
            self._stack.callback(os.close, self._handles[file])
        return self._handles[file]

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            self._maps[file] = self._stack.enter_context(mmap.mmap(self._handle(file), 0))
        return self._maps[file]

    def _pack(self, owner: int, file: str, offset: int, data: memoryview) -> None:
        if owner not in self._parcels:
            path = parcel(self._folder, self._rank, owner)
            self._parcels[owner] = self._stack.enter_context(path.open("wb"))
        self._parcels[owner].write(_LABEL.pack(self._files.index(file), offset, len(data)))
        self._parcels[owner].write(data)


@contextmanager
def writing(folder: Path, files: list[str], rank: int, shares: FileShares) -> Iterator[Writer]:
    """A rank's writer into the files of a folder; they are closed at the end."""
    with ExitStack() as stack:
        yield Writer(folder, files, rank, shares, stack)


def parcel(folder: Path, sender: int, owner: int) -> Path:
    """The path of one rank's parcel for another."""
    return folder / f"{sender}-to-{owner}.parcel"


def remove_parcels(folder: Path) -> None:
    """Remove the unpacked parcels."""
    for path in folder.glob("*.parcel"):
        path.unlink()

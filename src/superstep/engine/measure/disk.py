"""Bytes per second that a folder's disk writes and reads: of one file through the system's cache, and past it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from superstep.engine.activations.direct_file import DirectFile
from superstep.state.fsync import nearest_folder

SIZE = 2**26
"""Bytes of the test file."""


def disk_rates(folder: Path) -> tuple[float, float]:
    """Read and write rates in bytes per second. The file is dropped from the system's cache before it is read; where
    that is not possible, the cache may answer.
    """
    path, block = folder / "disk", os.urandom(2**20)
    start_s = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(SIZE // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    write = SIZE / (time.perf_counter() - start_s)
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start_s = time.perf_counter()
        while file.read(2**20):
            pass
        read = SIZE / (time.perf_counter() - start_s)
    path.unlink()
    return read, write


def direct_rates(folder: Path) -> tuple[float, float]:
    """Read and write rates of activations that lie in a folder, which need not exist. Raises ConfigError or DiskFault
    as ``DirectFile``.
    """
    file, content = DirectFile(nearest_folder(folder)), torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    part = file.allocate(SIZE)
    times_s = [time.perf_counter()]
    for copy in (file.write, file.read):
        copy(part, content)
        times_s.append(time.perf_counter())
    start_s, written_s, read_s = times_s
    return SIZE / (read_s - written_s), SIZE / (written_s - start_s)

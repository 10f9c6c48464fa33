"""measure_disk: bytes per second that a folder's disk writes and reads, of one file."""

from __future__ import annotations

import os
import time
from pathlib import Path

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

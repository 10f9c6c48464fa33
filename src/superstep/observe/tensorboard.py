"""TensorBoard scalars, written with the standard library alone.

An event file is a sequence of records, each a protocol buffer in a frame that reveals a torn write:

    length          8 bytes, little-endian
    its checksum    4 bytes     CRC-32C (Castagnoli), then rotated and offset
    Event           `length` bytes
    its checksum    4 bytes

Of the buffers, only these fields are needed (tensorboard/compat/proto/event.proto, summary.proto):

    Event       1 wall_time: double   2 step: int64   3 file_version: string   5 summary   7 session_log
    Summary     1 value: Value, repeated
    Value       1 tag: string   2 simple_value: float
    SessionLog  1 status: START is 1
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from superstep.observe.append_file import AppendFile
from superstep.observe.events import Event, Resumed, RolledBack
from superstep.observe.metric_names import scalars


class TensorBoard:
    """The sink for ``tensorboard --logdir RUN``."""

    def __init__(self, folder: Path, *, most_waiting_bytes: int = 0, clock: Callable[[], float] = time.time) -> None:
        """Open a new event file in ``folder``; a resumed run's curves continue those of earlier files. The most bytes
        that wait in memory while the disk does not take them are ``most_waiting_bytes``. Raises Fault where the file
        cannot be opened.
        """
        now = clock()
        # TensorBoard reads the files of a folder in the order of their names, which begin with the time.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._clock = clock
        with suppress(OSError):  # the file that cannot be opened then says why
            folder.mkdir(exist_ok=True)  # not the run's own: one that was removed gets no other
        self._file = AppendFile(folder / name, most_waiting_bytes=most_waiting_bytes)
        self._file.append(record(_double(1, now) + _bytes(3, b"brain.Event:2")))

    def write(self, event: Event) -> None:
        """Append the event's scalars; ``Resumed`` and ``RolledBack`` make TensorBoard forget later steps. Raises Fault
        where the disk is full or broken.
        """
        if isinstance(event, Resumed | RolledBack):
            # The START of a session at step k discards the points of step k and of those after it.
            self._append(event.step + 1, _bytes(7, _whole(1, 1)))
        elif (tags := scalars(event)) is not None:
            values = [_bytes(1, tag.encode()) + _float(2, point) for tag, point in tags.points.items()]
            self._append(tags.step, _bytes(5, b"".join(_bytes(1, value) for value in values)))

    def _append(self, step: int, body: bytes) -> None:
        self._file.append(record(_double(1, self._clock()) + _whole(2, step) + body), step=step)

    def close(self) -> None:
        self._file.close()


def record(event: bytes) -> bytes:
    """An Event in its frame."""
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


# A field of a protocol buffer is a key, number << 3 | wire type, and a value. Every key here fits one byte.
def _whole(number: int, value: int) -> bytes:
    return bytes([number << 3]) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return bytes([number << 3 | 1]) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _float(number: int, value: float) -> bytes:
    try:
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    except OverflowError:  # larger than single precision holds
        return _float(number, float("inf") if value > 0 else float("-inf"))


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; the top bit means that more follow."""
    low = []
    while value >= 0x80:
        low.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*low, value])


def _checksum(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CASTAGNOLI[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _table(polynomial: int) -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (polynomial if crc & 1 else 0)
        rows.append(crc)
    return tuple(rows)


_CASTAGNOLI = _table(0x82F63B78)

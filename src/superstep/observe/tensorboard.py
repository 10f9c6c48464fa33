"""TensorBoard scalars, written with the standard library alone.

An event file is a row of records, each a protocol buffer in a frame that shows where a write was torn:

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
from pathlib import Path

from superstep.observe.append_file import AppendFile
from superstep.observe.events import Evaluated, Event, LossTold, Resumed, Rolled, RolledBack, RouterSeen, StepDone
from superstep.observe.router_balance import busiest, dropped_share


class TensorBoard:
    """The sink that plots a run: ``tensorboard --logdir RUN``."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Opens a new event file in ``folder``; a resumed run's curves join those of the files before it.

        Raises:
            Fault: the file cannot be opened or written.
        """
        now = clock()
        # TensorBoard reads the files of a folder in the order of their names, which begin with the time.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._clock = clock
        self._file = AppendFile(folder / name)
        self._file.append(record(_double(1, now) + _bytes(3, b"brain.Event:2")))

    def write(self, event: Event) -> None:
        """Append the event's scalars; ``Resumed`` and ``RolledBack`` make TensorBoard forget the steps after it.

        Raises:
            Fault: the disk is full or broken.
        """
        match event:
            case StepDone() | LossTold() | RouterSeen() | Rolled() | Evaluated():
                values = [_bytes(1, tag.encode()) + _float(2, point) for tag, point in scalars(event).items()]
                self._append(event.step, _bytes(5, b"".join(_bytes(1, value) for value in values)))
            case Resumed() | RolledBack():
                # The START of a session at step k discards the points of step k and of those after it.
                self._append(event.step + 1, _bytes(7, _whole(1, 1)))
            case _:
                pass

    def _append(self, step: int, body: bytes) -> None:
        self._file.append(record(_double(1, self._clock()) + _whole(2, step) + body), step=step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def scalars(event: StepDone | LossTold | RouterSeen | Rolled | Evaluated) -> dict[str, float]:
    """The points that an event adds to the curves, by tag."""
    match event:
        case StepDone():
            points = {
                "train/loss": event.loss,
                "train/lr": event.lr,
                "train/grad_norm": event.grad_norm,
                "train/tokens_seen": event.tokens_seen,
                "speed/tokens_per_s": event.tokens_per_s,
                "speed/step_s": event.step_s,
                "speed/data_s": event.data_s,
                "memory/peak_bytes": event.memory_bytes,
            }
            return points if event.mfu is None else points | {"speed/mfu": event.mfu}
        case LossTold():
            return {f"loss/{name}": value for name, value in zip(event.names, event.values, strict=True)}
        case RouterSeen():
            points = {
                "router/dropped_share": dropped_share(sum(event.chosen, ()), sum(event.dropped, ())),
                "router/balance": sum(event.balance) / len(event.balance),
                "router/z": sum(event.z) / len(event.z),
            }
            return points | {f"router_busiest/layer_{i}": busiest(row) for i, row in enumerate(event.chosen)}
        case Rolled():
            points = {
                "rollouts/reward": event.reward,
                "rollouts/cut_share": event.cut / max(1, event.answers + event.lost),
                "rollouts/lost": event.lost,
                "rollouts/uniform_groups": event.uniform,
                "rollouts/lag": event.lag,
                "rollouts/drawn_tokens_per_s": event.drawn_tokens / max(event.seconds, 1e-9),
            }
            return points | {f"policy/{name}": value for name, value in event.measures.items()}
        case Evaluated():
            points = {"validation/loss": event.loss}
            bits = event.bits_per_byte
            return points if bits is None else points | {"validation/bits_per_byte": bits}


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
    """Seven bits a byte, lowest first; the top bit says that more follow."""
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

"""Protocol Buffers on the wire: as much as Tinker's messages need, and no generated code.

A message is a row of fields. Each is a tag, which is the field's number and how its value is written, and the value:

    0  varint       7 bits a byte, the lowest first; the top bit says that more follow
    1  8 bytes      a double
    2  a length and so many bytes: text, bytes, a message within, or a packed row of numbers
    5  4 bytes      a float

https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from superstep.errors import DataError

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5
SIZES = {DOUBLE: 8, FLOAT: 4}
MOST_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class ProtoField:
    """One field of a message.

    Attributes:
        number: which.
        kind: how it was written.
        value: a varint as it is; else bytes.
    """

    number: int
    kind: int
    value: int | bytes

    @property
    def data(self) -> bytes:
        """The value of a length-prefixed field.

        Raises:
            DataError: it was written otherwise.
        """
        if self.kind != BYTES or not isinstance(self.value, bytes):
            raise self._other("bytes")
        return self.value

    @property
    def text(self) -> str:
        """The same as text."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise self._other("UTF-8") from None

    @property
    def integer(self) -> int:
        """A signed varint."""
        if not isinstance(self.value, int):
            raise self._other("an integer")
        return self.value - (1 << 64) if self.value >= 1 << 63 else self.value

    @property
    def integers(self) -> list[int]:
        """Signed varints, packed or one."""
        if isinstance(self.value, int):
            return [self.integer]
        numbers, at = [], 0
        while at < len(self.data):
            number, at = _varint(self.data, at)
            numbers.append(ProtoField(self.number, VARINT, number).integer)
        return numbers

    @property
    def double(self) -> float:
        """A double."""
        if self.kind != DOUBLE or not isinstance(self.value, bytes):
            raise self._other("a double")
        (number,) = struct.unpack("<d", self.value)
        return float(number)

    def _other(self, what: str) -> DataError:
        return DataError(f"the protobuf body cannot be read: field {self.number} is not {what}.")


def fields(data: bytes) -> Iterator[ProtoField]:
    """The fields of a message, in the order in which they were written.

    Raises:
        DataError: it is none.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield ProtoField(number, kind, value)
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in SIZES:
            size = SIZES[kind]
        else:
            raise DataError(f"the protobuf body cannot be read: field {number} is of the unknown kind {kind}.")
        if number == 0 or size > len(data) - at:
            raise DataError(f"the protobuf body cannot be read: field {number} goes on behind its end.")
        yield ProtoField(number, kind, data[at : at + size])
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next thing begins."""
    number = 0
    for place in range(MOST_VARINT_BYTES):
        if at + place >= len(data):
            break
        byte = data[at + place]
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number & 0xFFFF_FFFF_FFFF_FFFF, at + place + 1
    raise DataError("the protobuf body cannot be read: it ends within a number.")


def entry(data: bytes) -> tuple[str, bytes]:
    """A key of a map, and its value where that is bytes: a message of fields 1 and 2."""
    key, value = "", b""
    for field in fields(data):
        if field.number == 1:
            key = field.text
        elif field.number == 2:
            value = field.data
    return key, value


def put_varint(number: int) -> bytes:
    """A number; a negative one as its two's complement of 64 bits."""
    number &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def put_integer(number: int, value: int) -> bytes:
    """A field of a varint."""
    return put_varint(number << 3 | VARINT) + put_varint(value)


def put_double(number: int, value: float) -> bytes:
    """A field of a double."""
    return put_varint(number << 3 | DOUBLE) + struct.pack("<d", value)


def put_bytes(number: int, value: bytes | str) -> bytes:
    """A field of bytes, text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return put_varint(number << 3 | BYTES) + put_varint(len(data)) + data

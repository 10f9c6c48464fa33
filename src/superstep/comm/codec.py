"""Messages between processes: msgspec's structs as MessagePack, and never a pickle.

A message can do nothing to who receives it but be one of the forms that are expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

VERSION = 1
"""The first byte of each message. Raise it where a message changes: two versions then refuse each other."""

M = TypeVar("M")


class Codec(Generic[M]):
    """The messages that go one way.

    Args:
        form: a struct, or a union of structs with tags.
    """

    def __init__(self, form: Any) -> None:  # noqa: ANN401 - a type, or a union of types
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(form)
        self._version = bytes([VERSION])

    def encode(self, message: M) -> bytes:
        """The bytes of a message."""
        return self._version + self._encoder.encode(message)

    def decode(self, data: bytes) -> M:
        """The message of such bytes; raises msgspec.DecodeError of any others."""
        if not data.startswith(self._version):
            raise msgspec.DecodeError(f"a message begins with {data[:1]!r}; those of this version with {VERSION}")
        message: M = self._decoder.decode(memoryview(data)[1:])
        return message

    def to_numbers(self, message: M) -> list[int]:
        """The bytes of a message as a row of numbers, which a collective sends."""
        return list(self.encode(message))

    def from_numbers(self, numbers: Sequence[int]) -> M:
        """The message of such a row; raises msgspec.DecodeError of any other."""
        return self.decode(bytes(numbers))

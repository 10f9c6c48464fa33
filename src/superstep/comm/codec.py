"""Codec: messages between processes as plain data in MessagePack, never a pickle.

A received message can only be one of the expected forms: numbers, texts, bytes, paths, and dataclasses, structs and
collections of them. An error goes as ``errors.ErrorMessage``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

VERSION = 1
"""The first byte of each message. Raise it where a message changes: two versions then refuse each other."""

M = TypeVar("M")


class Codec(Generic[M]):
    """The messages in one direction. ``form``: their type; of several structs, a union of structs with tags."""

    def __init__(self, form: Any) -> None:  # noqa: ANN401 - a type, or a union of types
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder = msgspec.msgpack.Decoder(form, dec_hook=_from_plain)
        self._version = bytes([VERSION])

    def encode(self, message: M) -> bytes:
        return self._version + self._encoder.encode(message)

    def decode(self, data: bytes) -> M:
        """Decode a message; raises msgspec.DecodeError for other bytes."""
        if not data.startswith(self._version):
            raise msgspec.DecodeError(f"a message begins with {data[:1]!r}; those of this version with {VERSION}")
        message: M = self._decoder.decode(memoryview(data)[1:])
        return message

    def to_numbers(self, message: M) -> list[int]:
        """A message as a list of numbers, for a collective."""
        return list(self.encode(message))

    def from_numbers(self, numbers: Sequence[int]) -> M:
        """Decode such a list; raises msgspec.DecodeError for any other."""
        return self.decode(bytes(numbers))


def _plain(value: object) -> bytes:
    if isinstance(value, Path):
        return os.fsencode(value)  # a name on disk may be no text
    raise TypeError(f"a {type(value).__name__} is no plain data; send what it consists of")


def _from_plain(form: type, value: object) -> object:
    if form is Path and isinstance(value, bytes):
        return Path(os.fsdecode(value))
    raise TypeError(f"{value!r} is no {form.__name__}")

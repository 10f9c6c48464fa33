"""Text files, read in blocks or by lines: encodings from byte order marks, and detection of binary files."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

BLOCK_BYTES = 1 << 20
"""Bytes read at once."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encoding of a file.

    Attributes:
        name: for display, and for Python.
        mark: the byte order mark; empty without one, and the text is UTF-8.
    """

    name: str
    mark: bytes

    @property
    def is_wide(self) -> bool:
        """Whether its text may contain zero bytes."""
        return not self.name.startswith("UTF-8")


# UTF-32's mark begins as UTF-16's does.
_MARKED = (
    Encoding("UTF-8", codecs.BOM_UTF8),
    Encoding("UTF-32-LE", codecs.BOM_UTF32_LE),
    Encoding("UTF-32-BE", codecs.BOM_UTF32_BE),
    Encoding("UTF-16-LE", codecs.BOM_UTF16_LE),
    Encoding("UTF-16-BE", codecs.BOM_UTF16_BE),
)


class UndecodableError(Exception):
    """Bytes that are no text.

    Attributes:
        encoding: the assumed encoding.
        offset: of the first of them in the file.
    """

    def __init__(self, encoding: str, offset: int) -> None:
        super().__init__(f"is not {encoding} at byte {offset}")
        self.encoding = encoding
        self.offset = offset


def encoding_of(path: Path) -> Encoding:
    """The encoding by the file's byte order mark; UTF-8 without one."""
    with path.open("rb") as file:
        start = file.read(4)
    return next((each for each in _MARKED if start.startswith(each.mark)), Encoding("UTF-8", b""))


def find_nul(path: Path) -> int | None:
    """The offset of the first zero byte, which text of narrow encodings does not contain."""
    offset = 0
    with path.open("rb") as file:
        while data := file.read(BLOCK_BYTES):
            if (place := data.find(b"\0")) >= 0:
                return offset + place
            offset += len(data)
    return None


def blocks(path: Path, encoding: Encoding) -> Iterator[tuple[str, int]]:
    """The text without its mark, block by block, each with the number of its bytes; the last has no text.

    Raises:
        UndecodableError: the file has another encoding.
    """
    decoder = codecs.getincrementaldecoder(encoding.name)()
    offset = len(encoding.mark)
    with path.open("rb") as file:
        file.seek(offset)
        while True:
            data = file.read(BLOCK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise UndecodableError(encoding.name, offset - pending + error.start) from None
            offset += len(data)
            yield text, len(data)
            if not data:
                return


def lines(path: Path, encoding: Encoding, longest: int) -> Iterator[bytes]:
    """The lines as UTF-8, without the file's mark. A line of ``longest`` bytes is incomplete: the rest follows.

    Raises:
        UndecodableError: a wide file has another encoding; a narrow one is not checked.
    """
    with path.open("rb") as file:
        file.seek(len(encoding.mark))
        if not encoding.is_wide:
            yield from iter(lambda: file.readline(longest), b"")
            return
        yield from _wide_lines(file, encoding, longest)


def _wide_lines(file: IO[bytes], encoding: Encoding, longest: int) -> Iterator[bytes]:
    text = io.TextIOWrapper(file, encoding.name, newline="\n")
    try:
        while line := text.readline(longest):
            yield line.encode()
    except UnicodeDecodeError as error:
        raise UndecodableError(encoding.name, file.tell() - len(error.object) + error.start) from None

"""Documents: the text of files, folders, JSONL and parquet, read in parts and in a fixed order.

    a .jsonl file      one document a line: the field ``text_field`` of the line's object
    a .parquet file    one document a row: the column ``text_field``
    a folder           its files, then its subfolders, each in sorted order
    any other file     one document

Text is UTF-8, or the encoding of its byte order mark. A folder's hidden files (a leading dot), binary files (a NUL
byte) and links to folders are left out. Empty documents are left out everywhere.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from superstep.data.preparation.read_errors import null_text, refusal, undecodable
from superstep.data.preparation.records import (
    RecordFields,
    TextRecord,
    json_lines,
    json_objects,
    parquet_objects,
    parquet_rows,
)
from superstep.data.preparation.text_files import UndecodableError, blocks, encoding_of, find_nul
from superstep.data.split_documents import DocumentPart
from superstep.plan.config import DataConfig

LIBRARY_SKIPS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders of the standard library that are installed packages, tests or caches, at any depth."""

PART_CHARS = 1 << 20
"""Characters of a record's text in one part."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, and its origin: named itself, in a named folder, or in Python's library."""

    path: Path
    origin: Literal["named", "folder", "library"]


def source_files(paths: tuple[str, ...]) -> Iterator[SourceFile]:
    """The files of a ``CorpusReader``, in its order.

    Raises:
        DataError: a path does not exist, or a folder cannot be listed.
    """
    for name in paths or (None,):
        yield from _files_of(name)


class CorpusReader:
    """Reads every document of a corpus once, in order; without paths, the source text of Python's standard library.

    Attributes:
        read_bytes: of the files, so far.
        nulls: number of skipped records with a null text.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self.read_bytes = 0
        self.nulls = 0

    def parts(self) -> Iterator[DocumentPart]:
        """The documents, in parts.

        Files of the standard library that are not text are left out; elsewhere they are an error.

        Raises:
            DataError: a path cannot be read as text, or holds none.
        """
        for name in self._config.corpus or (None,):
            has_text = False
            for file in _files_of(name):
                for part in self._read(file):
                    has_text = True
                    yield part
            if not has_text:
                where = "the standard library's folder" if name is None else f"'{name}'"
                raise refusal(where, "holds no text", "name files that do")

    def _read(self, file: SourceFile) -> Iterator[DocumentPart]:
        path, field = file.path, self._config.text_field
        with _reading(path):
            match path.suffix.lower():
                case ".jsonl":
                    yield from self._records(path, json_lines(path, encoding_of(path), field))
                case ".parquet":
                    yield from self._records(path, parquet_rows(path, field))
                case _:
                    if _is_text(file):
                        yield from self._text(path)

    def _text(self, path: Path) -> Iterator[DocumentPart]:
        held = ""
        for text, read_bytes in blocks(path, encoding_of(path)):
            self.read_bytes += read_bytes
            if text and held:
                yield DocumentPart(held, is_last=False)
            held = text or held
        if held:
            yield DocumentPart(held, is_last=True)

    def _records(self, path: Path, records: Iterable[TextRecord]) -> Iterator[DocumentPart]:
        for number, record in enumerate(records, 1):
            self.read_bytes += record.read_bytes
            if record.text is None:
                if self._config.nulls == "refuse":
                    raise null_text(self._config.text_field, f"record {number} of {path}")
                self.nulls += 1
                continue
            for start in range(0, len(record.text), PART_CHARS):
                stop = start + PART_CHARS
                yield DocumentPart(record.text[start:stop], is_last=stop >= len(record.text))


def _files_of(name: str | None) -> Iterator[SourceFile]:
    if name is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        for path in _walk(library, LIBRARY_SKIPS):
            if path.suffix == ".py":
                yield SourceFile(path, "library")
        return
    if not name.strip():
        raise refusal(f"'{name}'", "is no path", "name text, .jsonl or .parquet files, or folders of them")
    path = Path(name)
    with _reading(path):
        mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        for inside in _walk(path, frozenset()):
            yield SourceFile(inside, "folder")
    elif stat.S_ISREG(mode):
        yield SourceFile(path, "named")
    else:
        raise refusal(f"'{name}'", "is neither a file nor a folder", "write the text to a file and name that")


def _walk(folder: Path, skips: frozenset[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise refusal(f"'{error.filename}'", f"cannot be listed ({error.strerror})", "grant access or leave it out")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skips)
        for name in sorted(names):
            path = Path(parent, name)
            # A broken link is included, so that reading it raises an error; a pipe would block.
            if not name.startswith(".") and (path.is_file() or not path.exists()):
                yield path


def _is_text(file: SourceFile) -> bool:
    """Whether a file is text, decided before any of it is yielded: a NUL can be anywhere in it."""
    encoding = encoding_of(file.path)
    place = None if encoding.is_wide else find_nul(file.path)
    if place is not None:
        if file.origin == "named":
            raise refusal(f"'{file.path}'", f"is binary (a NUL at byte {place})", "name a file of text")
        return False
    if file.origin == "library":
        try:
            for _ in blocks(file.path, encoding):
                pass
        except UndecodableError:
            return False
    return True


def objects(paths: tuple[str, ...]) -> Iterator[RecordFields]:
    """Every whole record of some .jsonl and .parquet files.

    Raises:
        DataError: a path is no such file or folder of them, or cannot be read.
    """
    for name in paths:
        has_any = False
        for file in _files_of(name):
            path = file.path
            with _reading(path):
                match path.suffix.lower():
                    case ".jsonl":
                        parsed = json_objects(path, encoding_of(path))
                    case ".parquet":
                        parsed = parquet_objects(path)
                    case _:
                        raise refusal(f"'{path}'", "is neither .jsonl nor .parquet", "name files of records")
                for record in parsed:
                    has_any = True
                    yield record
        if not has_any:
            raise refusal(f"'{name}'", "holds no records", "name files that do")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Converts errors of reading ``path`` into a DataError."""
    try:
        yield
    except FileNotFoundError:
        mend = "name a text, .jsonl or .parquet file, or a folder of them"
        raise refusal(f"'{path}'", "does not exist", mend) from None
    except UndecodableError as error:
        raise undecodable(path, str(path), error.encoding, error.offset) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise refusal(f"'{path}'", f"cannot be read ({reason})", "grant access or leave it out") from None

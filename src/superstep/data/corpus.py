"""Documents: the text of files, folders, JSONL and parquet, read one at a time in a fixed order.

    a .jsonl file      one document a line: the field ``text_field`` of the line's object
    a .parquet file    one document a row: the column ``text_field``
    a folder           its files, then its subfolders, each in sorted order
    any other file     one document, read whole

A folder's hidden files (a leading dot), binary files (a NUL byte) and links to folders are left out. Empty
documents are left out everywhere.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from superstep.errors import DataError, did_you_mean

LIBRARY_SKIPS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders of the standard library that are installed packages, tests or caches, at any depth."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, and how it was found: named itself, inside a named folder, or in Python's library."""

    path: Path
    origin: Literal["named", "folder", "library"]


def documents(paths: tuple[str, ...], text_field: str) -> Iterator[str]:
    """Every document of ``paths`` in order; without paths, the source text of Python's standard library.

    Files of the standard library that are not UTF-8 are left out; anywhere else they are an error.

    Raises:
        DataError: where a path cannot be read as text, or holds none.
    """
    for name in paths or (None,):
        has_text = False
        for file in _files_of(name):
            for text in _read(file, text_field):
                has_text = True
                yield text
        if not has_text:
            where = "the standard library's folder" if name is None else f"'{name}'"
            raise _error(where, "holds no text", "name files that do")


def source_files(paths: tuple[str, ...]) -> Iterator[SourceFile]:
    """The files that ``documents`` reads, in its order.

    Raises:
        DataError: where a path does not exist or a folder cannot be listed.
    """
    for name in paths or (None,):
        yield from _files_of(name)


def _files_of(name: str | None) -> Iterator[SourceFile]:
    if name is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        for path in _walk(library, LIBRARY_SKIPS):
            if path.suffix == ".py":
                yield SourceFile(path, "library")
        return
    if not name.strip():
        raise _error(f"'{name}'", "is no path", "name text, .jsonl or .parquet files, or folders of them")
    path = Path(name)
    with _reading(path):
        mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        for inside in _walk(path, frozenset()):
            yield SourceFile(inside, "folder")
    elif stat.S_ISREG(mode):
        yield SourceFile(path, "named")
    else:
        raise _error(f"'{name}'", "is neither a file nor a folder", "write the text to a file and name that")


def _walk(folder: Path, skips: frozenset[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise _error(f"'{error.filename}'", f"cannot be listed ({error.strerror})", "grant access or leave it out")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skips)
        for name in sorted(names):
            path = Path(parent, name)
            # What is neither there nor a file is a broken link, and reading it says so; a pipe would block.
            if not name.startswith(".") and (path.is_file() or not path.exists()):
                yield path


def _read(file: SourceFile, text_field: str) -> Iterator[str]:
    with _reading(file.path):
        match file.path.suffix.lower():
            case ".jsonl":
                yield from _jsonl(file.path, text_field)
            case ".parquet":
                yield from _parquet(file.path, text_field)
            case _:
                yield from _text(file)


def _text(file: SourceFile) -> Iterator[str]:
    data = file.path.read_bytes()
    is_binary = b"\0" in data
    if is_binary and file.origin != "named":
        return
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if file.origin == "library":
            return
        raise _not_utf8(file.path, str(file.path), error.start) from None
    if is_binary:
        raise _error(f"'{file.path}'", f"is binary (a NUL at byte {data.index(0)})", "name a file of text")
    if text:
        yield text


def _jsonl(path: Path, text_field: str) -> Iterator[str]:
    offset = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                decoded = line.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, where, offset + error.start) from None
            offset += len(line)
            if decoded.strip() and (text := _text_of_line(decoded, text_field, where)):
                yield text


def _text_of_line(line: str, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _error(f"'{where}'", f"is not JSON ({error})", "put one JSON object on each line") from None
    if not isinstance(record, dict):
        raise _error(f"'{where}'", f"is {_kind(record)}, not an object", "put one JSON object on each line")
    if text_field not in record:
        raise _no_field(text_field, where, list(record))
    text = _checked(record[text_field], text_field, where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise _error(f"'{where}'", f"holds half a surrogate pair ({code}), which is no text", "mend it") from None
    return text


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        mend = "install it with: pip install superstep[parquet]"
        raise _error(f"'{path}'", "needs the package pyarrow", mend) from None
    try:
        with parquet.ParquetFile(path) as table:
            if text_field not in table.schema_arrow.names:
                raise _no_field(text_field, str(path), table.schema_arrow.names)
            row = 0
            for block in table.iter_batches(columns=[text_field]):
                for value in block.column(0).to_pylist():
                    row += 1
                    if text := _checked(value, text_field, f"{path} row {row}"):
                        yield text
    except (ArrowException, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise _error(f"'{path}'", f"is not sound parquet ({reason})", "write the file again") from None


def _checked(value: object, text_field: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"data.text_field = '{text_field}' is {_kind(value)} in {where}, not text; "
            "set data.text_field to a field that always holds text, or leave that record out."
        )
    return value


def _kind(value: object) -> str:
    """What JSON calls the type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return f"of type {type(value).__name__}"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns an operating system's error about ``path`` into a DataError."""
    try:
        yield
    except FileNotFoundError:
        mend = "name a text, .jsonl or .parquet file, or a folder of them"
        raise _error(f"'{path}'", "does not exist", mend) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise _error(f"'{path}'", f"cannot be read ({reason})", "grant access or leave it out") from None


def _error(value: str, rule: str, mend: str) -> DataError:
    return DataError(f"data.corpus: {value} {rule}; {mend}.")


def _not_utf8(path: Path, where: str, offset: int) -> DataError:
    source, target = shlex.quote(str(path)), shlex.quote(f"{path.with_suffix('')}.utf8{path.suffix}")
    mend = f"convert it, for example: iconv -f LATIN1 -t UTF-8 {source} > {target}"
    return _error(f"'{where}'", f"is not UTF-8 at byte {offset}", mend)


def _no_field(text_field: str, where: str, fields: list[str]) -> DataError:
    choices = did_you_mean(text_field, fields) if fields else "; leave the empty object out."
    have = ", ".join(fields) or "none"
    return DataError(f"data.text_field = '{text_field}' is not in {where}, whose fields are: {have}{choices}")

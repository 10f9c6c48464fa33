"""Records: the text of a JSONL file's lines and of a parquet file's rows, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superstep.data.preparation.read_errors import kind, no_field, no_text, refusal, undecodable
from superstep.data.preparation.text_files import Encoding, lines
from superstep.errors import DataError

LONGEST_RECORD_BYTES = 1 << 28
"""Bytes of one line: it is in memory three times until it is cut into parts."""

LONGEST_CELL_BYTES = 1 << 27
"""Bytes of one cell of parquet: it is in memory six times while it is decoded."""

READ_BYTES = 1 << 23
"""Approximate bytes of a parquet column that are decoded at once."""


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A record's text, or None for null; and the approximate bytes that it was read from."""

    text: str | None
    read_bytes: int


@dataclass(frozen=True, slots=True)
class RecordFields:
    """A whole record, its place, the approximate bytes that it was read from, and the folder of its file."""

    where: str
    values: dict[str, Any]
    read_bytes: int
    folder: Path = Path()


def json_lines(path: Path, encoding: Encoding, text_field: str) -> Iterator[TextRecord]:
    """One record for each line that is not blank.

    Raises:
        DataError: a line is not UTF-8 or no object, or its field no text.
        UndecodableError: the file's encoding differs from its mark.
    """
    for decoded, where, read_bytes in _decode_lines(path, encoding):
        yield TextRecord(_text_of_line(decoded, text_field, where), read_bytes)


def json_objects(path: Path, encoding: Encoding) -> Iterator[RecordFields]:
    """The object of each line that is not blank; raises as ``json_lines`` does."""
    for decoded, where, read_bytes in _decode_lines(path, encoding):
        yield RecordFields(where, _object_of_line(decoded, where), read_bytes, path.parent)


def _decode_lines(path: Path, encoding: Encoding) -> Iterator[tuple[str, str, int]]:
    """Each line that is not blank, its place, and its bytes."""
    offset = len(encoding.mark)
    for number, line in enumerate(lines(path, encoding, LONGEST_RECORD_BYTES), 1):
        where = f"{path}:{number}"
        read_bytes = len(line)
        if read_bytes >= LONGEST_RECORD_BYTES:
            raise _too_long(where, read_bytes)
        try:
            decoded = line.decode()
        except UnicodeDecodeError as error:
            raise undecodable(path, where, "UTF-8", offset + error.start) from None
        del line  # free a long line before its result is used
        offset += read_bytes
        if decoded.strip():
            yield decoded, where, read_bytes


def _object_of_line(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise refusal(f"'{where}'", f"is not JSON ({error})", "put one JSON object on each line") from None
    if not isinstance(record, dict):
        raise refusal(f"'{where}'", f"is {kind(record)}, not an object", "put one JSON object on each line")
    return record


def _text_of_line(line: str, text_field: str, where: str) -> str | None:
    record = _object_of_line(line, where)
    if text_field not in record:
        raise no_field(text_field, where, list(record))
    text = _check_text(record[text_field], text_field, where)
    try:
        if text is not None and not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise refusal(f"'{where}'", f"holds half a surrogate pair ({code}), which is no text", "mend it") from None
    return text


def parquet_rows(path: Path, text_field: str) -> Iterator[TextRecord]:
    """One record for each row.

    Raises:
        DataError: pyarrow is not installed, the file is damaged, or the column is missing or holds no text.
    """
    with _parquet(path) as table:
        if text_field not in table.schema_arrow.names:
            raise no_field(text_field, str(path), table.schema_arrow.names)
        for block, first, per_row in _blocks(path, table, [text_field]):
            for row, value in enumerate(block.column(0), first):
                yield TextRecord(_text_of_cell(value, text_field, f"{path} row {row}"), per_row)


def parquet_objects(path: Path) -> Iterator[RecordFields]:
    """Each row as an object; raises as ``parquet_rows`` does."""
    with _parquet(path) as table:
        for block, first, per_row in _blocks(path, table, None):
            for row, values in enumerate(block.to_pylist(), first):
                yield RecordFields(f"{path} row {row}", values, per_row, path.parent)


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """The open file; its errors become one line."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        mend = "install it with: pip install superstep[parquet]"
        raise refusal(f"'{path}'", "needs the package pyarrow", mend) from None
    try:
        with parquet.ParquetFile(path, buffer_size=READ_BYTES) as table:
            yield table
    except (ArrowException, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise refusal(f"'{path}'", f"is not sound parquet ({reason})", "write the file again") from None


def _blocks(path: Path, table: Any, columns: list[str] | None) -> Iterator[tuple[Any, int, int]]:  # noqa: ANN401
    """Blocks of rows, the number of their first row, and the approximate bytes of each."""
    per_row = path.stat().st_size // max(table.metadata.num_rows, 1)
    row = 1
    for group in range(table.num_row_groups):
        rows = _rows_at_once(table.metadata.row_group(group))
        for block in table.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
            yield block, row, per_row
            row += block.num_rows


def _text_of_cell(cell: Any, text_field: str, where: str) -> str | None:  # noqa: ANN401 - pyarrow has no types
    if cell.is_valid and hasattr(cell, "as_buffer") and cell.as_buffer().size >= LONGEST_CELL_BYTES:
        raise _too_long(where, cell.as_buffer().size)
    return _check_text(cell.as_py(), text_field, where)


def _rows_at_once(group: object) -> int:
    """Rows of a group with about ``READ_BYTES``, if all rows are alike."""
    size: int = group.total_byte_size  # type: ignore[attr-defined]
    rows: int = group.num_rows  # type: ignore[attr-defined]
    return max(1, min(rows, READ_BYTES * rows // max(size, 1)))


def _too_long(where: str, size: int) -> DataError:
    return refusal(
        f"'{where}'",
        f"is one record of {size >> 20} MiB or more, and one is held whole",
        "cut it into several, or write its text to a file of its own, which is read in parts",
    )


def _check_text(value: object, text_field: str, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise no_text(value, text_field, where)
    return value

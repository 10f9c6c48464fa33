"""Rows of parquet files, such as Hugging Face's data sets of pictures: ``pip install "superstep[parquet]"``.

A picture's column is its bytes, or, in those data sets, a struct {"bytes": ..., "path": ...}.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from superstep.errors import DataError


class ParquetRows:
    """The rows of some files, by number: a dict of columns. All are held in memory, as Arrow holds them.

    Args:
        paths: of the files, in this order.
        columns: to read; None for all.

    Raises:
        DataError: pyarrow is not installed, a file cannot be read, or has no such columns.
    """

    def __init__(self, paths: Iterable[str | Path], columns: Sequence[str] | None = None) -> None:
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError:
            raise DataError(
                'parquet files need pyarrow, which is not installed: pip install "superstep[parquet]".'
            ) from None
        tables = []
        for path in paths:
            try:
                names = parquet.read_schema(path).names
                if missing := [name for name in columns or () if name not in names]:
                    raise DataError(f"'{path}' has no column '{missing[0]}'; its columns are {', '.join(names)}.")
                tables.append(parquet.read_table(path, columns=None if columns is None else list(columns)))
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"'{path}' cannot be read as parquet ({str(error).splitlines()[0]}).") from None
        if not tables:
            raise DataError("there are no parquet files; name at least one.")
        try:
            self._table = pa.concat_tables(tables)
        except pa.ArrowException as error:
            raise DataError(f"the parquet files differ in their columns ({str(error).splitlines()[0]}).") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row


def picture_bytes(value: object) -> bytes:
    """The bytes of a picture's column.

    Raises:
        DataError: it holds something else, such as a path only.
    """
    raw = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(raw, bytes):
        kind = f"a struct of {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
        raise DataError(f"a picture's column holds {kind} without bytes; write the picture's file into it.")
    return raw

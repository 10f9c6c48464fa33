"""Errors of a corpus that cannot be read: place, rule and fix in one line."""

from __future__ import annotations

import shlex
from pathlib import Path

from superstep.errors import DataError, did_you_mean


def refusal(value: str, rule: str, mend: str) -> DataError:
    """An error about a path of the corpus."""
    return DataError(f"data.corpus: {value} {rule}; {mend}.")


def undecodable(path: Path, where: str, encoding: str, offset: int) -> DataError:
    """An error about bytes that are no text, with a command that converts them from a common encoding."""
    source, target = shlex.quote(str(path)), shlex.quote(f"{path.with_suffix('')}.utf8{path.suffix}")
    mend = f"convert it, for example: iconv -f LATIN1 -t UTF-8 {source} > {target}"
    if encoding != "UTF-8":
        mend = "the mark at its start says that it is; write the file again"
    return refusal(f"'{where}'", f"is not {encoding} at byte {offset}", mend)


def no_field(text_field: str, where: str, fields: list[str]) -> DataError:
    """An error about a record without the text field."""
    choices = did_you_mean(text_field, fields) if fields else "; leave the empty object out."
    have = ", ".join(fields) or "none"
    return DataError(f"data.text_field = '{text_field}' is not in {where}, whose fields are: {have}{choices}")


def no_text(value: object, text_field: str, where: str) -> DataError:
    """An error about a field that is not text."""
    return DataError(
        f"data.text_field = '{text_field}' is {kind(value)} in {where}, not text; "
        "set data.text_field to a field that always holds text, or leave that record out."
    )


def null_text(text_field: str, where: str) -> DataError:
    """An error about a null field, where nulls are not skipped."""
    return DataError(
        f"data.text_field = '{text_field}' is null in {where}; set data.nulls to 'skip' to pass such records over, "
        "or leave them out."
    )


def kind(value: object) -> str:
    """JSON's name for the type of a value."""
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

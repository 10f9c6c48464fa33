"""Rows: an engine step as its ranks compute it, one flat row of tokens. It travels from rank 0 to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRows:
    """Neighbouring rows of one request.

    Attributes:
        first: position of the first row's token.
        count: rows.
        pages: where the keys of all positions up to the last row's lie.
        adapter: the number of the adapter that adds to them; 0 is none.
    """

    first: int
    count: int
    pages: tuple[int, ...]
    adapter: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tokens side by side.

    Attributes:
        tokens: their ids.
        parts: whose they are, in the same order.
        wanted: rows whose logits are asked for.
        is_draft: whether the small model computes them, which guesses.
    """

    tokens: tuple[int, ...]
    parts: tuple[RequestRows, ...]
    wanted: tuple[int, ...]
    is_draft: bool = False


def positions(parts: Sequence[RequestRows]) -> list[int]:
    """The position of each row in its text."""
    return [place for part in parts for place in range(part.first, part.first + part.count)]


def to_numbers(rows: Rows) -> list[int]:
    """The rows as numbers in a row, as ranks send them to each other."""
    numbers = [int(rows.is_draft), len(rows.tokens), len(rows.parts), len(rows.wanted), *rows.tokens, *rows.wanted]
    for part in rows.parts:
        numbers += (part.first, part.count, part.adapter, len(part.pages), *part.pages)
    return numbers


def from_numbers(numbers: Sequence[int]) -> Rows:
    """The rows that ``to_numbers`` wrote."""
    is_draft, tokens, count, wanted, *rest = numbers
    at = tokens + wanted
    parts = []
    for _ in range(count):
        first, rows, adapter, pages = rest[at : at + 4]
        parts.append(RequestRows(first=first, count=rows, pages=tuple(rest[at + 4 : at + 4 + pages]), adapter=adapter))
        at += 4 + pages
    return Rows(
        tokens=tuple(rest[:tokens]),
        wanted=tuple(rest[tokens : tokens + wanted]),
        parts=tuple(parts),
        is_draft=bool(is_draft),
    )

"""Rows: the tokens of an engine step in one flat row, in the form in which rank 0 sends them to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRows:
    """Consecutive rows of one request.

    Attributes:
        first: position of the first row's token.
        count: rows.
        pages: pages of the keys of all positions up to the last row's.
        adapter: the number of the request's adapter; 0 is none.
    """

    first: int
    count: int
    pages: tuple[int, ...]
    adapter: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The tokens of a step.

    Attributes:
        tokens: their ids.
        parts: the requests that they belong to, in the same order.
        wanted: rows of which the logits are needed.
        is_draft: whether the draft model computes them.
    """

    tokens: tuple[int, ...]
    parts: tuple[RequestRows, ...]
    wanted: tuple[int, ...]
    is_draft: bool = False


def positions(parts: Sequence[RequestRows]) -> list[int]:
    """The position of each row in its request."""
    return [place for part in parts for place in range(part.first, part.first + part.count)]


def to_numbers(rows: Rows) -> list[int]:
    """Encode rows as integers, to send between ranks."""
    numbers = [int(rows.is_draft), len(rows.tokens), len(rows.parts), len(rows.wanted), *rows.tokens, *rows.wanted]
    for part in rows.parts:
        numbers += (part.first, part.count, part.adapter, len(part.pages), *part.pages)
    return numbers


def from_numbers(numbers: Sequence[int]) -> Rows:
    """Decode the integers of ``to_numbers``."""
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

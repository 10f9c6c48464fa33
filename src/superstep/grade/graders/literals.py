"""Values from a candidate's program: read as plain data, and compared by trusted code."""

from __future__ import annotations

import math
from typing import Any

NUMBERS = (int, float)


def decode(value: object) -> Any:  # noqa: ANN401 - any data
    """Decode what ``child.plain`` encoded; raises ValueError for anything else."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case ["list" | "tuple", list(items)]:
            return [decode(each) for each in items]
        case ["set" | "frozenset", list(items)]:
            return _Unordered([decode(each) for each in items])
        case ["dict", list(pairs)] if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return _Pairs([(decode(key), decode(each)) for key, each in pairs])
        case _:
            raise ValueError("no data")


class _Unordered(list[Any]):
    """The members of a set."""


class _Pairs(list[tuple[Any, Any]]):
    """The pairs of a dict."""


def same(expected: object, given: object, tolerance: float = 0.0) -> bool:
    """Whether a candidate's value equals the expected one.

    Truth values are not numbers; 3 equals 3.0, a list equals a tuple, and NaN equals NaN. Numbers may differ by
    ``tolerance`` times their size or 1, whichever is more.
    """
    match expected:
        case bool() | None | str():
            return type(given) is type(expected) and given == expected
        case int() | float():
            return type(given) in NUMBERS and _near(expected, given, tolerance)  # type: ignore[arg-type]
        case list() | tuple():
            return type(given) is list and _all_same(list(expected), given, tolerance)
        case set() | frozenset():
            return isinstance(given, _Unordered) and _match_all(list(expected), list(given), tolerance)
        case dict():
            pairs = [list(pair) for pair in expected.items()]
            return isinstance(given, _Pairs) and _match_all(pairs, [list(pair) for pair in given], tolerance)
        case _:
            raise TypeError(f"a test expects a {type(expected).__name__}, which is no data")


def _near(expected: float, given: float, tolerance: float) -> bool:
    if isinstance(expected, int) and isinstance(given, int) and not tolerance:
        return expected == given
    if math.isnan(expected) or math.isnan(given):
        return math.isnan(expected) and math.isnan(given)
    if math.isinf(expected) or math.isinf(given):
        return expected == given
    return expected == given or abs(expected - given) <= tolerance * max(1.0, abs(expected))


def _all_same(expected: list[Any], given: list[Any], tolerance: float) -> bool:
    return len(expected) == len(given) and all(
        same(one, other, tolerance) for one, other in zip(expected, given, strict=True)
    )


def _match_all(expected: list[Any], given: list[Any], tolerance: float) -> bool:
    """Whether the lists match one to one, in any order."""
    if len(expected) != len(given):
        return False
    left = list(given)
    for one in expected:
        match = next((k for k, other in enumerate(left) if same(one, other, tolerance)), None)
        if match is None:
            return False
        del left[match]
    return True

"""Which cases of a test are left to ``make test-all``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def longer(cases: Iterable[Any], is_long: Callable[[Any], bool]) -> list[Any]:
    """The same cases for ``parametrize``, those that are long marked as such."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) if is_long(case) else case
        for case in cases
    ]


def many_ranks(worlds: Iterable[int], most: int = 2) -> list[Any]:
    """Numbers of ranks, of which more than ``most`` are long: two cores take them in turn."""
    return longer(worlds, lambda world: world > most)


def first_few(layouts: Mapping[int, Sequence[Any]], few: Mapping[int, int]) -> list[Any]:
    """For numbers of ranks the part of their layouts that a case has: so many first ones, and all others, which are
    long; for numbers that ``few`` does not name all are.
    """
    found = []
    for world, every in layouts.items():
        count = few.get(world, 0)
        if count:
            found.append(pytest.param(world, slice(count), id=f"{world}"))
        if count < len(every):
            found.append(pytest.param(world, slice(count, None), id=f"{world}-others", marks=pytest.mark.long))
    return found

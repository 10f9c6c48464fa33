"""Which cases of a test are left to ``make test-all``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

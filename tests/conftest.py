"""Fixtures of the whole suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # `bench` is imported from the repository's root

from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks that live as long as the session."""
    ranks = Pool(8)
    yield ranks
    ranks.close()

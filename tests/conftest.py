"""Fixtures of the whole suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks that live as long as the session."""
    ranks = Pool(8)
    yield ranks
    ranks.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which files take the time."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    terminalreporter.section("slowest files")
    for name, spent in seconds.most_common(10):
        terminalreporter.write_line(f"{spent:7.1f} s  {name}")

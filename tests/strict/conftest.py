"""Tests of the strict device, which has to be there before torch is imported."""

import sys

import pytest

pytest.register_assert_rewrite("strict_runs")


def pytest_runtest_setup(item):
    if "strict_device" not in sys.modules:
        pytest.fail("this test runs on the strict device: make strict", pytrace=False)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Text of its own, which is prepared in a moment."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"The number after {n} is {n + 1}.\n" for n in range(4000)), encoding="utf-8")
    return ("--data.corpus", str(path))

"""Tests of the strict device, which has to be there before torch is imported."""

import sys

import pytest

pytest.register_assert_rewrite("strict_runs")


def pytest_runtest_setup(item):
    if "strict_device" not in sys.modules:
        pytest.fail("this test runs on the strict device: make strict", pytrace=False)

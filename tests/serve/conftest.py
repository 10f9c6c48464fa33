"""What tests of serving share."""

import os
from collections.abc import Iterator

import pytest

from official_client import OfficialClient, official_client


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The folder of operations that are compiled for the tests, once for all processes that run them."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def running() -> Iterator[OfficialClient]:
    with official_client() as client:
        yield client


@pytest.fixture
def setting(running: OfficialClient) -> OfficialClient:
    running.reset()
    return running

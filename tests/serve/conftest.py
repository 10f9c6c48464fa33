"""What tests of serving share."""

from collections.abc import Iterator

import pytest

from official_client import OfficialClient, official_client


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The folder of operations that are compiled for the tests, once."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def running() -> Iterator[OfficialClient]:
    with official_client() as client:
        yield client


@pytest.fixture
def setting(running: OfficialClient) -> OfficialClient:
    running.reset()
    return running

"""What tests of serving share."""

from collections.abc import Iterator

import pytest

from official_client import OfficialClient, official_client
from superstep.kernels.compile_cpp import folder_of
from superstep.serve.compute.kernels.build import NAMES, SOURCES


@pytest.fixture(scope="session")
def compiled():
    """The folder of operations that are compiled for the tests: once for all processes and sessions that run them, for
    a file's name tells sources, flags and processor.
    """
    return folder_of(SOURCES / NAMES[0])


@pytest.fixture(scope="module")
def running() -> Iterator[OfficialClient]:
    with official_client() as client:
        yield client


@pytest.fixture
def setting(running: OfficialClient) -> OfficialClient:
    running.reset()
    return running

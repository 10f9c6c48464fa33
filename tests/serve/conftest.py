"""What tests of serving share."""

import pytest


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The folder of operations that are compiled for the tests, once."""
    return tmp_path_factory.mktemp("compiled")

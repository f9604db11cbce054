"""The processes that the tests of this folder share: three at most, started by the first test that needs them."""

import pytest
from tests.support.processes import Processes


@pytest.fixture(scope="session")
def processes():
    pool = Processes()
    yield pool
    pool.stop()
